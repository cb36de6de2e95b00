// Aggregation over a graph without a (B, N, K, C) tensor, forward and backward.
//
//     x (B, N, C) nodes   y (B, M, C) candidates   graph (B, N, K) int64: indices in y
//     winners (B, N, C): which neighbour attains the maximum; the backward adds to it alone
//
// Features and their gradients are of type S, and everything is computed in T = Number<S>.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "vector.h"

namespace {

// Which outputs are computed from the neighbours y_j of a node x_i. With `relative`, x_i is
// subtracted from maximum and mean; `with_self` makes x_i the first output. The outputs of a
// channel are adjacent.
struct Outputs {
    bool max, mean, total, with_self;
    int count() const { return max + mean + total + with_self; }
};

constexpr int64_t BAND = 64;  // channels of a node that are reduced together

// Writes output p of channel c to place c * count + p.
template <typename S>
inline void interleave(const S (*values)[BAND], int64_t num, int count, S* to) {
    if (count == 1) {
        std::copy(values[0], values[0] + num, to);
    } else if (count == 2) {
        for (int64_t c = 0; c < num; ++c) {
            to[2 * c] = values[0][c];
            to[2 * c + 1] = values[1][c];
        }
    } else {
        for (int64_t c = 0; c < num; ++c)
            for (int p = 0; p < count; ++p) to[c * count + p] = values[p][c];
    }
}

// Converts numbers.
template <typename From, typename To>
inline void convert(const From* from, int64_t num, To* to) {
    for (int64_t c = 0; c < num; c += WIDTH<To>)
        store<To>(to + c, load(from + c, num - c), num - c);
}

// The inputs and outputs of one node for a band of channels. A null output is not wanted.
template <typename S, typename W>
struct Node {
    using T = Number<S>;
    const S* x;  // null: nothing is subtracted
    const T* y;
    const int64_t* neighbours;
    const T* weights;
    int64_t K, C;
    W* winners;
    T *largest, *mean, *total;
};

// Reduces the neighbours for VECTORS x WIDTH channels from c on, or for the first `left` channels
// of one vector. Takes several vectors at once, because each comparison waits for the one before.
template <int VECTORS, bool WINNERS, bool SUMS, typename S, typename W>
inline void reduce(const Node<S, W>& node, int64_t c, int64_t left) {
    using T = Number<S>;
    using V = Vector<T>;
    using I = Whole<T>;
    using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
    const int64_t width = WIDTH<T>;
    const auto part = [left](const T* from, int v) {
        return VECTORS > 1 ? load(from + v * WIDTH<T>) : load(from, left);
    };
    V top[VECTORS], sums[VECTORS] = {};
    I winner[VECTORS] = {};
    for (int v = 0; v < VECTORS; ++v) top[v] = part(node.y + node.neighbours[0] * node.C + c, v);
    for (int64_t k = 0; k < node.K; ++k) {
        const T* from = node.y + node.neighbours[k] * node.C + c;
        for (int v = 0; v < VECTORS; ++v) {
            const V value = part(from, v);
            const I better = ~(value <= top[v]) & (top[v] == top[v]);  // the first NaN stays
            top[v] = better ? value : top[v];
            if (WINNERS) winner[v] = better ? I{} + static_cast<Index>(k) : winner[v];
            if (SUMS) sums[v] += node.weights ? node.weights[k] * value : value;
        }
    }
    for (int v = 0; v < VECTORS; ++v, c += width) {
        const V self = node.x ? load(node.x + c, left) : V{};
        if (node.largest) store<T>(node.largest + c, top[v] - self, left);
        if (WINNERS)
            for (int64_t i = 0; i < width && i < left; ++i)
                node.winners[c + i] = static_cast<W>(winner[v][i]);
        if (node.mean) store<T>(node.mean + c, sums[v] / T(node.K) - self, left);
        if (node.total) store<T>(node.total + c, sums[v], left);
    }
}

template <bool WINNERS, bool SUMS, typename S, typename W>
inline void reduce_all(const Node<S, W>& node, int64_t num) {
    constexpr int VECTORS = 4;
    const int64_t width = WIDTH<S>;
    int64_t c = 0;
    for (; c + VECTORS * width <= num; c += VECTORS * width)
        reduce<VECTORS, WINNERS, SUMS>(node, c, width);
    for (; c < num; c += width) reduce<1, WINNERS, SUMS>(node, c, num - c);
}

template <typename S, typename W>
void aggregate_node(const S* x, const Number<S>* y, const int64_t* neighbours,
                    const Number<S>* weights, S* out, W* winners, int64_t K, int64_t C,
                    int64_t start, int64_t num, Outputs outputs, bool relative) {
    Number<S> values[4][BAND];
    int output = 0;
    if (outputs.with_self) convert(x + start, num, values[output++]);
    Node<S, W> node = {relative ? x + start : nullptr, y + start, neighbours, weights, K, C};
    node.winners = winners ? winners + start : nullptr;
    node.largest = outputs.max ? values[output++] : nullptr;
    node.mean = outputs.mean ? values[output++] : nullptr;
    node.total = outputs.total ? values[output++] : nullptr;
    const bool sums = outputs.mean || outputs.total;
    if (winners)
        sums ? reduce_all<true, true>(node, num) : reduce_all<true, false>(node, num);
    else
        sums ? reduce_all<false, true>(node, num) : reduce_all<false, false>(node, num);
    S* to = out + start * outputs.count();
    if constexpr (std::is_same_v<S, Number<S>>) {
        interleave(values, num, outputs.count(), to);
    } else {
        uint16_t narrow[4][BAND];
        for (int i = 0; i < output; ++i)
            convert(values[i], num, reinterpret_cast<S*>(narrow[i]));
        interleave(narrow, num, outputs.count(), reinterpret_cast<uint16_t*>(to));
    }
}

// The candidates of one image after another. Each is read for many nodes, so narrow ones are widened
// once for all of them.
template <typename S>
struct Candidates {
    using T = Number<S>;
    const S* y;
    int64_t size, image = -1;  // numbers of an image, and which one was widened
    std::vector<T> wide;

    Candidates(const S* y_, int64_t size_)
        : y(y_), size(size_), wide(std::is_same_v<S, T> ? 0 : size_) {}
    const T* of(int64_t wanted) {
        if constexpr (std::is_same_v<S, T>) {
            return y + wanted * size;
        } else {
            if (image != wanted) convert(y + wanted * size, size, wide.data());
            image = wanted;
            return wide.data();
        }
    }
};

template <typename S, typename W>
void aggregate(const S* x, const S* y, const int64_t* graph, const Number<S>* weights, S* out,
               W* winners, int64_t B, int64_t N, int64_t M, int64_t C, int64_t K, Outputs outputs,
               bool relative, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Candidates<S> candidates(y, M * C);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < B * N; ++i)
            for (int64_t start = 0; start < C; start += BAND)
                aggregate_node(x ? x + i * C : nullptr, candidates.of(i / N), graph + i * K,
                               weights ? weights + i * K : nullptr, out + i * C * outputs.count(),
                               winners ? winners + i * C : nullptr, K, C, start,
                               std::min(BAND, C - start), outputs, relative);
    }
}

// Rows of a band of channels, `stride` numbers apart.
template <typename T>
struct Band {
    T* first;
    int64_t stride;
    T* row(int64_t i) const { return first + i * stride; }
};

// Adds the gradients of one image to dx and dy, for the `num` channels from `start` on.
template <typename S, typename W>
void backward_band(const S* grad, const int64_t* graph, const W* winners, const Number<S>* weights,
                   Band<Number<S>> dx, Band<Number<S>> dy, int64_t N, int64_t C, int64_t K,
                   int64_t start, int64_t num, Outputs outputs, bool relative) {
    using T = Number<S>;
    const int count = outputs.count();
    for (int64_t n = 0; n < N; ++n) {
        const S* from = grad + (n * C + start) * count;
        T self[BAND] = {};
        int output = 0;
        if (outputs.with_self) {
            for (int64_t c = 0; c < num; ++c) self[c] += number(from[c * count]);
            ++output;
        }
        if (outputs.max) {
            for (int64_t c = 0; c < num; ++c) {
                const T g = number(from[c * count + output]);
                if (relative) self[c] -= g;
                dy.row(graph[n * K + winners[n * C + start + c]])[c] += g;
            }
            ++output;
        }
        if (outputs.mean || outputs.total) {
            T row[BAND];
            for (int64_t c = 0; c < num; ++c) {
                row[c] = number(from[c * count + output]);
                if (outputs.mean) {
                    if (relative) self[c] -= row[c];
                    row[c] /= T(K);
                }
            }
            for (int64_t k = 0; k < K; ++k) {
                const T weight = weights ? weights[n * K + k] : T(1);
                T* to = dy.row(graph[n * K + k]);
                for (int64_t c = 0; c < num; ++c) to[c] += weight * row[c];
            }
        }
        if (relative || outputs.with_self)
            for (int64_t c = 0; c < num; ++c) dx.row(n)[c] += self[c];
    }
}

// The gradients of one image, as above. dx may be null: then y is x, and dy takes both. Sums of many
// numbers are kept in T, and those that are wanted in fewer bits have a place of their own.
template <typename S, typename W>
void backward_image(const S* grad, const int64_t* graph, const W* winners, const Number<S>* weights,
                    S* dx, S* dy, int64_t N, int64_t M, int64_t C, int64_t K, int64_t start,
                    int64_t num, Outputs outputs, bool relative) {
    using T = Number<S>;
    const auto add = [&](Band<T> to_x, Band<T> to_y) {
        backward_band(grad, graph, winners, weights, dx ? to_x : to_y, to_y, N, C, K, start, num,
                      outputs, relative);
    };
    if constexpr (std::is_same_v<S, T>) {
        for (int64_t m = 0; m < M; ++m) std::fill_n(dy + m * C + start, num, T(0));
        for (int64_t n = 0; dx && n < N; ++n) std::fill_n(dx + n * C + start, num, T(0));
        add({dx + start, C}, {dy + start, C});
    } else {
        std::vector<T> of_x(dx ? N * BAND : 0), of_y(M * BAND);
        add({of_x.data(), BAND}, {of_y.data(), BAND});
        for (int64_t m = 0; m < M; ++m) convert(&of_y[m * BAND], num, dy + m * C + start);
        for (int64_t n = 0; dx && n < N; ++n) convert(&of_x[n * BAND], num, dx + n * C + start);
    }
}

template <typename S, typename W>
void aggregate_backward(const S* grad, const S* y, const int64_t* graph, const W* winners,
                        const Number<S>* weights, S* dx, S* dy, Number<S>* d_weights, int64_t B,
                        int64_t N, int64_t M, int64_t C, int64_t K, Outputs outputs, bool relative,
                        int threads) {
    const int64_t num_bands = (C + BAND - 1) / BAND, width = C * outputs.count();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t job = 0; job < B * num_bands; ++job) {
        const int64_t b = job / num_bands, start = job % num_bands * BAND;
        backward_image(grad + b * N * width, graph + b * N * K,
                       winners ? winners + b * N * C : nullptr,
                       weights ? weights + b * N * K : nullptr, dx ? dx + b * N * C : nullptr,
                       dy + b * M * C, N, M, C, K, start, std::min(BAND, C - start), outputs,
                       relative);
    }
    if (!d_weights) return;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < B * N; ++i)
        for (int64_t k = 0; k < K; ++k) {
            const S* row = y + (i / N * M + graph[i * K + k]) * C;
            Number<S> total = 0;
            for (int64_t c = 0; c < C; ++c)  // the sum is the last output
                total += number(grad[i * width + (c + 1) * outputs.count() - 1]) * number(row[c]);
            d_weights[i * K + k] = total;
        }
}

Outputs outputs_of(int mask) {
    return {(mask & 1) != 0, (mask & 2) != 0, (mask & 4) != 0, (mask & 8) != 0};
}

}  // namespace

#define AGGREGATE(S, NAME, W, WINNERS)                                                             \
    extern "C" void vigpipe_aggregate_##NAME##_##WINNERS(                                          \
        const S* x, const S* y, const int64_t* graph, const Number<S>* weights, S* out,            \
        W* winners, int64_t B, int64_t N, int64_t M, int64_t C, int64_t K, int outputs,            \
        int relative, int threads) {                                                               \
        aggregate(x, y, graph, weights, out, winners, B, N, M, C, K, outputs_of(outputs), relative,\
                  threads);                                                                        \
    }                                                                                              \
    extern "C" void vigpipe_aggregate_backward_##NAME##_##WINNERS(                                 \
        const S* grad, const S* y, const int64_t* graph, const W* winners,                         \
        const Number<S>* weights, S* dx, S* dy, Number<S>* d_weights, int64_t B, int64_t N,        \
        int64_t M, int64_t C, int64_t K, int outputs, int relative, int threads) {                 \
        aggregate_backward(grad, y, graph, winners, weights, dx, dy, d_weights, B, N, M, C, K,     \
                           outputs_of(outputs), relative, threads);                                \
    }

AGGREGATE(float, float32, uint8_t, uint8)
AGGREGATE(float, float32, int32_t, int32)
AGGREGATE(double, float64, uint8_t, uint8)
AGGREGATE(double, float64, int32_t, int32)
AGGREGATE(BFloat16, bfloat16, uint8_t, uint8)
AGGREGATE(BFloat16, bfloat16, int32_t, int32)
