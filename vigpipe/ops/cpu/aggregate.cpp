// Aggregation over a graph without a (B, N, K, C) tensor, forward and backward.
//
//     x (B, N, C) nodes   y (B, M, C) candidates   graph (B, N, K) int64: indices in y
//     winners (B, N, C): which neighbour attains the maximum; the backward adds to it alone
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
template <typename T>
inline void interleave(const T (*values)[BAND], int64_t num, int count, T* to) {
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

// The inputs and outputs of one node for a band of channels. A null output is not wanted.
template <typename T, typename W>
struct Node {
    const T* x;  // null: nothing is subtracted
    const T* y;
    const int64_t* neighbours;
    const T* weights;
    int64_t K, C;
    W* winners;
    T *largest, *mean, *total;
};

// Reduces the neighbours for VECTORS x WIDTH channels from c on, or for the first `left` channels
// of one vector. Takes several vectors at once, because each comparison waits for the one before.
template <int VECTORS, bool WINNERS, bool SUMS, typename T, typename W>
inline void reduce(const Node<T, W>& node, int64_t c, int64_t left) {
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

template <bool WINNERS, bool SUMS, typename T, typename W>
inline void reduce_all(const Node<T, W>& node, int64_t num) {
    constexpr int VECTORS = 4;
    const int64_t width = WIDTH<T>;
    int64_t c = 0;
    for (; c + VECTORS * width <= num; c += VECTORS * width)
        reduce<VECTORS, WINNERS, SUMS>(node, c, width);
    for (; c < num; c += width) reduce<1, WINNERS, SUMS>(node, c, num - c);
}

template <typename T, typename W>
void aggregate_node(const T* x, const T* y, const int64_t* neighbours, const T* weights, T* out,
                    W* winners, int64_t K, int64_t C, int64_t start, int64_t num, Outputs outputs,
                    bool relative) {
    T values[4][BAND];
    int output = 0;
    if (outputs.with_self) {
        for (int64_t c = 0; c < num; ++c) values[output][c] = x[start + c];
        ++output;
    }
    Node<T, W> node = {relative ? x + start : nullptr, y + start, neighbours, weights, K, C};
    node.winners = winners ? winners + start : nullptr;
    node.largest = outputs.max ? values[output++] : nullptr;
    node.mean = outputs.mean ? values[output++] : nullptr;
    node.total = outputs.total ? values[output++] : nullptr;
    const bool sums = outputs.mean || outputs.total;
    if (winners)
        sums ? reduce_all<true, true>(node, num) : reduce_all<true, false>(node, num);
    else
        sums ? reduce_all<false, true>(node, num) : reduce_all<false, false>(node, num);
    interleave(values, num, outputs.count(), out + start * outputs.count());
}

template <typename T, typename W>
void aggregate(const T* x, const T* y, const int64_t* graph, const T* weights, T* out, W* winners,
               int64_t B, int64_t N, int64_t M, int64_t C, int64_t K, Outputs outputs,
               bool relative, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < B * N; ++i)
        for (int64_t start = 0; start < C; start += BAND)
            aggregate_node(x ? x + i * C : nullptr, y + i / N * M * C, graph + i * K,
                           weights ? weights + i * K : nullptr, out + i * C * outputs.count(),
                           winners ? winners + i * C : nullptr, K, C, start,
                           std::min(BAND, C - start), outputs, relative);
}

// Adds the gradients of one image to dx (null: y is x, so dy takes both) and dy, for the channels
// from start to start + num.
template <typename T, typename W>
void backward_band(const T* grad, const int64_t* graph, const W* winners, const T* weights, T* dx,
                   T* dy, int64_t N, int64_t C, int64_t K, int64_t start, int64_t num,
                   Outputs outputs, bool relative) {
    const int count = outputs.count();
    for (int64_t n = 0; n < N; ++n) {
        const T* from = grad + (n * C + start) * count;
        T self[BAND] = {};
        int output = 0;
        if (outputs.with_self) {
            for (int64_t c = 0; c < num; ++c) self[c] += from[c * count];
            ++output;
        }
        if (outputs.max) {
            for (int64_t c = 0; c < num; ++c) {
                const T g = from[c * count + output];
                if (relative) self[c] -= g;
                dy[graph[n * K + winners[n * C + start + c]] * C + start + c] += g;
            }
            ++output;
        }
        if (outputs.mean || outputs.total) {
            T row[BAND];
            for (int64_t c = 0; c < num; ++c) {
                row[c] = from[c * count + output];
                if (outputs.mean) {
                    if (relative) self[c] -= row[c];
                    row[c] /= T(K);
                }
            }
            for (int64_t k = 0; k < K; ++k) {
                const T weight = weights ? weights[n * K + k] : T(1);
                T* to = dy + graph[n * K + k] * C + start;
                for (int64_t c = 0; c < num; ++c) to[c] += weight * row[c];
            }
        }
        if (relative || outputs.with_self) {
            T* to = (dx ? dx : dy) + n * C + start;
            for (int64_t c = 0; c < num; ++c) to[c] += self[c];
        }
    }
}

// dx and dy must be filled with zeros by the caller.
template <typename T, typename W>
void aggregate_backward(const T* grad, const T* y, const int64_t* graph, const W* winners,
                        const T* weights, T* dx, T* dy, T* d_weights, int64_t B, int64_t N,
                        int64_t M, int64_t C, int64_t K, Outputs outputs, bool relative,
                        int threads) {
    const int64_t num_bands = (C + BAND - 1) / BAND, width = C * outputs.count();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t job = 0; job < B * num_bands; ++job) {
        const int64_t b = job / num_bands, start = job % num_bands * BAND;
        backward_band(grad + b * N * width, graph + b * N * K,
                      winners ? winners + b * N * C : nullptr,
                      weights ? weights + b * N * K : nullptr, dx ? dx + b * N * C : nullptr,
                      dy + b * M * C, N, C, K, start, std::min(BAND, C - start), outputs, relative);
    }
    if (!d_weights) return;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < B * N; ++i)
        for (int64_t k = 0; k < K; ++k) {
            const T* row = y + (i / N * M + graph[i * K + k]) * C;
            T total = 0;
            for (int64_t c = 0; c < C; ++c)  // the sum is the last output
                total += grad[i * width + (c + 1) * outputs.count() - 1] * row[c];
            d_weights[i * K + k] = total;
        }
}

Outputs outputs_of(int mask) {
    return {(mask & 1) != 0, (mask & 2) != 0, (mask & 4) != 0, (mask & 8) != 0};
}

}  // namespace

#define AGGREGATE(T, NAME, W, WINNERS)                                                             \
    extern "C" void vigpipe_aggregate_##NAME##_##WINNERS(                                          \
        const T* x, const T* y, const int64_t* graph, const T* weights, T* out, W* winners,        \
        int64_t B, int64_t N, int64_t M, int64_t C, int64_t K, int outputs, int relative,          \
        int threads) {                                                                             \
        aggregate(x, y, graph, weights, out, winners, B, N, M, C, K, outputs_of(outputs), relative,\
                  threads);                                                                        \
    }                                                                                              \
    extern "C" void vigpipe_aggregate_backward_##NAME##_##WINNERS(                                 \
        const T* grad, const T* y, const int64_t* graph, const W* winners, const T* weights,       \
        T* dx, T* dy, T* d_weights, int64_t B, int64_t N, int64_t M, int64_t C, int64_t K,         \
        int outputs, int relative, int threads) {                                                  \
        aggregate_backward(grad, y, graph, winners, weights, dx, dy, d_weights, B, N, M, C, K,     \
                           outputs_of(outputs), relative, threads);                                \
    }

AGGREGATE(float, float32, uint8_t, uint8)
AGGREGATE(float, float32, int32_t, int32)
AGGREGATE(double, float64, uint8_t, uint8)
AGGREGATE(double, float64, int32_t, int32)
