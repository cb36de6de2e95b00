// Calls every operator over odd sizes, in buffers that end where their tensors end; run under
// AddressSanitizer and UndefinedBehaviorSanitizer by test_compiler.py.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

// Headers first; files that use the same names for other things are in different namespaces.
#include "amx.h"
#include "csr.h"
#include "vector.h"

namespace first {
#include "accumulate.cpp"
#include "aggregate.cpp"
#include "attention.cpp"
#include "csr.cpp"
#include "csr_sum.cpp"
#include "gelu.cpp"
#include "grid.cpp"
#include "mask.cpp"
}
namespace second {
#include "csr_max.cpp"
#include "folded.cpp"
#include "knn.cpp"
}
namespace third {
#include "half_block.cpp"
#include "hidden.cpp"
}
namespace fourth {
#include "norm.cpp"
}
namespace fifth {
#include "axial.cpp"
}

using namespace first;
using namespace second;
using namespace third;
using namespace fourth;
using namespace fifth;

namespace {

std::mt19937 generator(0);

template <typename T>
std::vector<T> numbers(int64_t num) {
    std::normal_distribution<double> normal;
    std::vector<T> values(num);
    for (T& value : values) value = static_cast<T>(normal(generator));
    values.shrink_to_fit();
    return values;
}

// The upper halves of floats.
std::vector<BFloat16> halves(int64_t num) {
    const auto wide = numbers<float>(num);
    std::vector<uint32_t> bits(num);
    std::memcpy(bits.data(), wide.data(), num * sizeof(float));
    std::vector<BFloat16> values(num);
    std::transform(bits.begin(), bits.end(), values.begin(), [](uint32_t b) {
        return BFloat16{static_cast<uint16_t>(b >> 16)};
    });
    return values;
}

int64_t between(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(generator);
}

void call_neighbours(int threads) {
    const int64_t B = between(1, 3), N = between(1, 70), C = between(1, 70), k_most = 40;
    const bool own = between(0, 1), loop = between(0, 1) || N == 1;
    const int64_t M = own ? N : between(2, 70), k = between(1, std::min(k_most, M - !loop));
    const int64_t dilation = between(1, (M - !loop) / k);
    const auto x = numbers<float>(B * N * C), y = numbers<float>(B * M * C);
    const auto bias = numbers<float>(N * M);
    std::vector<int64_t> graph(B * N * k);
    vigpipe_knn_float32(x.data(), own ? nullptr : y.data(), bias.data(), graph.data(), B, N, M, C,
                        0, k, dilation, loop, threads);
    const int modes[] = {1, 2, 3, 4};
    const int mode = modes[between(0, 3)], with_self = between(0, 1) ? 8 : 0;
    const int count = (mode == 3 ? 2 : 1) + (with_self ? 1 : 0);
    const auto weights = numbers<float>(B * N * k);
    const float* used = mode == 4 ? weights.data() : nullptr;
    const float* from = own ? x.data() : y.data();
    std::vector<float> out(B * N * C * count), dx(B * N * C), dy(B * M * C), dw(B * N * k);
    std::vector<uint8_t> winners(B * N * C);
    const bool relative = mode != 4;
    vigpipe_aggregate_float32_uint8(x.data(), from, graph.data(), used, out.data(), winners.data(),
                                    B, N, M, C, k, mode + with_self, relative, threads);
    vigpipe_aggregate_backward_float32_uint8(
        out.data(), from, graph.data(), winners.data(), used, own ? nullptr : dx.data(), dy.data(),
        used ? dw.data() : nullptr, B, N, M, C, k, mode + with_self, relative, threads);
    const auto half_x = halves(B * N * C), half_y = halves(B * M * C);
    std::vector<BFloat16> half_out(B * N * C * count), half_dx(B * N * C), half_dy(B * M * C);
    const BFloat16* half_from = own ? half_x.data() : half_y.data();
    vigpipe_knn_bfloat16(half_x.data(), own ? nullptr : half_y.data(), bias.data(), graph.data(), B,
                         N, M, C, 0, k, dilation, loop, threads);
    vigpipe_aggregate_bfloat16_uint8(half_x.data(), half_from, graph.data(), used, half_out.data(),
                                     winners.data(), B, N, M, C, k, mode + with_self, relative,
                                     threads);
    vigpipe_aggregate_backward_bfloat16_uint8(
        half_out.data(), half_from, graph.data(), winners.data(), used,
        own ? nullptr : half_dx.data(), half_dy.data(), used ? dw.data() : nullptr, B, N, M, C, k,
        mode + with_self, relative, threads);
}

void call_norm(int threads) {
    const int64_t images = between(1, 3), R = images * between(1, 300), C = between(1, 70);
    const auto x = numbers<float>(R * C), residual = numbers<float>(R * C);
    const auto weight = numbers<float>(C), bias = numbers<float>(C);
    const auto sample_scale = numbers<float>(images);
    std::vector<float> y(R * C), dx(R * C), dw(C), db(C);
    std::vector<double> mean(C), variance(C);
    const int gelu = static_cast<int>(between(0, 1));
    vigpipe_norm_float32(x.data(), weight.data(), bias.data(), 1e-5, residual.data(),
                                sample_scale.data(), y.data(), mean.data(), variance.data(), R, C,
                                images, gelu, threads);
    vigpipe_norm_backward_float32(y.data(), x.data(), mean.data(), variance.data(),
                                         weight.data(), bias.data(), 1e-5, sample_scale.data(),
                                         dx.data(), dw.data(), db.data(), R, C, images, gelu,
                                         threads);
    const auto half_x = halves(R * C), half_residual = halves(R * C);
    std::vector<BFloat16> half_y(R * C), half_dx(R * C);
    vigpipe_norm_bfloat16(half_x.data(), weight.data(), bias.data(), 1e-5, half_residual.data(),
                          sample_scale.data(), half_y.data(), mean.data(), variance.data(), R, C,
                          images, gelu, threads);
    vigpipe_norm_backward_bfloat16(half_y.data(), half_x.data(), mean.data(), variance.data(),
                                   weight.data(), bias.data(), 1e-5, sample_scale.data(),
                                   half_dx.data(), dw.data(), db.data(), R, C, images, gelu,
                                   threads);
}

void call_hidden(int threads) {
    const int64_t R = between(1, 5000), H = 16 * between(1, 4);
    const auto x = numbers<float>(R * 7), A = numbers<float>(7 * H), a = numbers<float>(H);
    const auto B = numbers<float>(3 * H), grad = numbers<float>(R * 3);
    std::vector<float> y(R * 3), dx(R * 7), dA(7 * H), da(H), dB(3 * H);
    vigpipe_hidden_7_float32(x.data(), A.data(), a.data(), B.data(), y.data(), R, H, threads);
    vigpipe_hidden_backward_7_float32(grad.data(), x.data(), A.data(), a.data(), B.data(),
                                      dx.data(), dA.data(), da.data(), dB.data(), R, H, threads);
}

void call_fold(int threads) {
    const int64_t height = between(1, 9), width = between(1, 9), images = between(1, 90);
    const int64_t R = images * height * width, H = 16 * between(1, 4);
    const bool conv = between(0, 1);
    const int64_t F = conv ? 7 : 3;
    const auto x = numbers<float>(R * 3), W = numbers<float>(H * 3), b = numbers<float>(H);
    const auto rel = numbers<float>(H * H), grad = numbers<float>(R * F);
    const float *weights = conv ? rel.data() : nullptr, *rel_bias = conv ? b.data() : nullptr;
    std::vector<float> first(F * H), bias(H), dx(R * 3), d_total(R * 3), dW(H * 3), d_gamma(H);
    std::vector<float> d_beta(H), d_rel(H * H), d_root(H * H), to(R * 7);
    std::vector<double> counted(3 * H), moments(12), factors(3 * 4 * H), total(H * H);
    vigpipe_fold_float32(x.data(), W.data(), b.data(), b.data(), b.data(), 1e-5, weights, rel_bias,
                         weights, first.data(), bias.data(), counted.data(), moments.data(), R, H,
                         threads);
    vigpipe_fold_backward_float32(first.data(), bias.data(), grad.data(), x.data(), W.data(),
                                  b.data(), b.data(), 1e-5, weights, weights, moments.data(),
                                  dx.data(), d_total.data(), dW.data(), d_gamma.data(),
                                  d_beta.data(), d_rel.data(), d_root.data(),
                                  between(0, 1) ? factors.data() : nullptr, R, H, threads);
    vigpipe_features_float32(x.data(), x.data(), to.data(), images, height, width, threads);
    for (int is_first : {1, 0})
        vigpipe_add_products(factors.data(), factors.data() + 4 * H, total.data(), 2, H, H,
                             is_first, threads);
    const int64_t channels = between(1, 9);
    const auto nodes = numbers<float>(R * channels);
    std::vector<float> neighbours(R * channels);
    vigpipe_grid_sum_float32(nodes.data(), neighbours.data(), images, height, width, channels,
                             threads);
}

void call_half_block(int threads) {
    const int64_t images = between(1, 9), height = between(1, 9), width = between(1, 9);
    const int64_t R = images * height * width, H = 16 * between(1, 4), num = between(1, 3);
    const third::Shape shape{images, height, width, H, threads, threads};
    const bool conv = between(0, 1), has_sums = between(0, 1);
    // Linear, norm, convolution (rel, bias, root), Linear, norm.
    const std::vector<int64_t> sizes{3 * H, H, H, H, H * H, H, H * H, 3 * H, 3, 3, 3};
    std::vector<std::vector<float>> parameters;
    std::vector<const float*> weights;
    for (int64_t i = 0; i < 11; ++i) {
        parameters.push_back(numbers<float>(sizes[i]));
        weights.push_back(conv || i < 4 || i > 6 ? parameters[i].data() : nullptr);
    }
    const auto* all_weights = reinterpret_cast<const third::Weights*>(weights.data());
    const auto x = numbers<float>(R * 3), grad = numbers<float>(R * 3);
    const auto sample_scale = numbers<float>(images);
    const float* scale = between(0, 1) ? sample_scale.data() : nullptr;
    std::vector<float> z(R * 3), out(R * 3), kept(((conv ? 7 : 3) + 1) * H), dx(R * 3);
    std::vector<double> moments(18), of_first(num * 3 * H), of_second(num * 9);
    int64_t num_first = num - 1, num_second = num - 1;
    vigpipe_half_block(x.data(), all_weights, 1e-5, 1e-5, scale, z.data(), out.data(),
                       kept.data(), moments.data(), of_first.data(), &num_first, of_second.data(),
                       &num_second, &shape);
    int64_t all = 0;
    std::vector<std::vector<double>> totals;
    std::vector<double*> sums;
    for (int i : {0, 1, 2, 3, 5, 7, 8, 9, 10}) {
        if (weights[i]) all += sizes[i];
        totals.emplace_back(sizes[i]);
        sums.push_back(weights[i] ? totals.back().data() : nullptr);
    }
    const std::vector<int> are_first(9, static_cast<int>(between(0, 1)));
    std::vector<float> grads(all), d_rel(H * H), d_root(H * H);
    std::vector<double> factors(3 * 4 * H);
    vigpipe_half_block_backward(
        grad.data(), x.data(), all_weights, 1e-5, 1e-5, scale, z.data(), kept.data(),
        moments.data(), dx.data(), grads.data(), has_sums ? sums.data() : nullptr,
        are_first.data(), has_sums ? nullptr : d_rel.data(), has_sums ? nullptr : d_root.data(),
        has_sums ? factors.data() : nullptr, &shape);
}

void call_lanes(int threads) {
    const int64_t R = between(0, 300), C = between(0, 600);
    std::vector<int64_t> rows(R);
    for (auto& row : rows) row = between(0, int64_t(1) << 40) - (int64_t(1) << 39);
    std::vector<uint8_t> kept(R * C);
    vigpipe_lanes_at_least(rows.data(), kept.data(), int64_t(7) << 32, between(-32768, 32767), R, C,
                           threads);
}

void call_masks(int threads) {
    const int64_t R = between(0, 300), C = between(0, 300), num = R * C;
    std::vector<int64_t> rows(R);
    for (auto& row : rows) row = between(0, int64_t(1) << 40);
    const auto x = numbers<float>(num);
    std::vector<float> y(num), dx(num);
    std::vector<uint8_t> bits((num + 7) / 8);
    vigpipe_dropped_float32(rows.data(), x.data(), y.data(), 2.0, 7, between(-32768, 32767), R, C,
                            threads);
    vigpipe_relu_float32(x.data(), y.data(), bits.data(), num, threads);
    vigpipe_relu_backward_float32(y.data(), bits.data(), dx.data(), num, threads);
    std::vector<double> sums(num);
    for (int is_first : {1, 0}) vigpipe_accumulate(x.data(), sums.data(), num, is_first, threads);
    auto features = numbers<float>(num);
    vigpipe_gelu(features.data(), num, threads);
}

void call_edges(int threads) {
    const int64_t m = between(0, 60), n = between(1, 60), H = between(1, 5), c = between(1, 40);
    const int64_t C = H * c;
    std::vector<int64_t> indptr(m + 1);
    for (int64_t i = 0; i < m; ++i) indptr[i + 1] = indptr[i] + between(0, 3) * between(0, 9);
    const int64_t e = indptr[m];
    std::vector<int64_t> indices(e), turned(n + 1), targets(e), edges(e);
    for (auto& source : indices) source = between(0, n - 1);
    vigpipe_csr_transpose(indptr.data(), indices.data(), turned.data(), targets.data(),
                          edges.data(), m, n);
    if (m == n) vigpipe_csr_is_symmetric(indptr.data(), indices.data(), n);
    const auto x = numbers<float>(n * C), grad = numbers<float>(m * C), shares = numbers<float>(e * H);
    const auto of_sources = numbers<float>(n * H), of_targets = numbers<float>(m * H);
    const auto nodes = numbers<float>(n), rows = numbers<float>(m), weights = numbers<float>(C);
    std::vector<float> y(m * C), dx(n * C), d_shares(e * H), d_targets(m * H), d_weights(64 * C);
    std::vector<int32_t> winners(m * C);
    const bool some = between(0, 1);
    vigpipe_csr_sum_float32(indptr.data(), indices.data(), some ? shares.data() : nullptr,
                            some ? nodes.data() : nullptr, rows.data(), x.data(), grad.data(),
                            y.data(), m, C, some ? H : 1, C, C, C, threads);
    vigpipe_csr_max_float32(indptr.data(), indices.data(), x.data(), y.data(), winners.data(), m, C,
                            threads);
    vigpipe_csr_max_backward_float32(grad.data(), winners.data(), dx.data(), m, C, threads);
    vigpipe_edge_softmax_float32(indptr.data(), indices.data(), some ? shares.data() : nullptr,
                                 of_sources.data(), of_targets.data(), 0.2, d_shares.data(), m, H,
                                 threads);
    vigpipe_edge_softmax_backward_float32(indptr.data(), indices.data(), shares.data(),
                                          shares.data(), of_sources.data(), of_targets.data(), 0.2,
                                          d_shares.data(), d_targets.data(), m, H, threads);
    vigpipe_attention_backward_float32(turned.data(), targets.data(), edges.data(), shares.data(),
                                       grad.data(), x.data(), d_shares.data(), dx.data(), n, H, c,
                                       threads);
    vigpipe_pair_scores_float32(indptr.data(), indices.data(), x.data(), grad.data(),
                                weights.data(), 0.2, d_shares.data(), m, H, c, threads);
    vigpipe_pair_scores_backward_float32(indptr.data(), indices.data(), nullptr, shares.data(),
                                         grad.data(), x.data(), weights.data(), 0.2, y.data(),
                                         d_weights.data(), m, H, c, threads);
    vigpipe_pair_scores_backward_float32(turned.data(), targets.data(), edges.data(), shares.data(),
                                         x.data(), grad.data(), weights.data(), 0.2, dx.data(),
                                         nullptr, n, H, c, threads);
}

template <typename S, typename Forward, typename Backward, typename Far>
void call_axial_in(const std::vector<S>& x, const std::vector<S>& grad, int64_t B, int64_t H,
                   int64_t W, int64_t C, Forward forward, Backward backward, Far far, int threads) {
    using T = Number<S>;
    std::vector<fifth::Link> links(between(0, 6));
    int64_t gated = 0;
    for (auto& link : links) {
        const int64_t axis = between(0, 1), side = axis ? W : H;
        link = {axis, between(1 - side, side - 1), between(0, 1) ? ++gated : 0};
    }
    const bool soft = between(0, 1);
    const auto limit = numbers<T>(B), temperature = numbers<T>(1);
    const int64_t N = H * W, L = links.size(), bands = (C + 63) / 64;
    std::vector<S> out(B * N * C);
    std::vector<T> distances(B * gated * N), dx(B * N * C), slopes(B * bands * gated * N), of_far(B * N);
    const T* gate[] = {soft ? nullptr : limit.data(), soft ? temperature.data() : nullptr};
    double d_scale = 0;
    forward(x.data(), links.data(), gate[0], gate[1], out.data(), distances.data(), B, H, W, C, L,
            gated, between(0, 1) ? 1 : -1, threads);
    backward(grad.data(), x.data(), links.data(), gate[0], gate[1], distances.data(), dx.data(),
             soft ? slopes.data() : nullptr, &d_scale, B, H, W, C, L, gated, 1, threads);
    far(x.data(), of_far.data(), B, H, W, C, threads);
}

void call_axial(int threads) {
    const int64_t B = between(1, 3), H = between(1, 6), W = between(1, 6), C = between(1, 150);
    const int64_t num = B * H * W * C;
    call_axial_in(numbers<float>(num), numbers<float>(num), B, H, W, C, vigpipe_axial_float32,
                  vigpipe_axial_backward_float32, vigpipe_axial_far_float32, threads);
    call_axial_in(halves(num), halves(num), B, H, W, C, vigpipe_axial_bfloat16,
                  vigpipe_axial_backward_bfloat16, vigpipe_axial_far_bfloat16, threads);
}

}  // namespace

int main() {
    int calls = 0;
    for (int i = 0; i < 150; ++i, calls += 9) {
        const int threads = 1 + i % 3;
        call_neighbours(threads);
        call_norm(threads);
        call_hidden(threads);
        call_fold(threads);
        call_half_block(threads);
        call_lanes(threads);
        call_masks(threads);
        call_edges(threads);
        call_axial(threads);
    }
    std::printf("calls: %d\n", calls);
}
