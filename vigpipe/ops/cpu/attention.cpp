// Attention over the edges of a sparse graph: scores, their softmax, and gradients.
//
//     e edges from sources (n) to targets (m)   H heads of c channels
//     scores, shares (e, H)   shares are the softmax of scores over the edges of a target
//
// Nothing has edges x channels. What an edge adds to its source is found from the transposed graph,
// whose edge k is edge `edges[k]` of the graph.
#include <cmath>
#include <limits>

#include "csr.h"

namespace {

constexpr int64_t HEADS = 32;  // heads that a loop over edges takes together
constexpr int PARTS = 64;  // partial sums over all edges, whatever the number of threads

template <typename T>
inline T leaky(T score, T slope) {
    return score > 0 ? score : score * slope;
}

inline void exponentials(float* x, int64_t num) {
    for (int64_t i = 0; i < num; i += WIDTH<float>)
        store<float>(x + i, exponential(load(x + i, num - i)), num - i);
}

inline void exponentials(double* x, int64_t num) {
    for (int64_t i = 0; i < num; ++i) x[i] = std::exp(x[i]);
}

// Turns the scores of one row, (num, H), into shares.
template <typename T>
void softmax(T* x, int64_t num, int64_t H) {
    for (int64_t start = 0; start < H; start += HEADS) {
        const int64_t heads = std::min(HEADS, H - start);
        T top[HEADS], total[HEADS];
        for (int64_t h = 0; h < heads; ++h) top[h] = x[start + h], total[h] = 0;
        for (int64_t k = 1; k < num; ++k)
            for (int64_t h = 0; h < heads; ++h) {
                const T score = x[k * H + start + h];
                top[h] = score > top[h] ? score : top[h];
            }
        for (int64_t k = 0; k < num; ++k)
            for (int64_t h = 0; h < heads; ++h) x[k * H + start + h] -= top[h];
        if (heads == H)
            exponentials(x, num * H);
        else
            for (int64_t k = 0; k < num; ++k) exponentials(x + k * H + start, heads);
        for (int64_t k = 0; k < num; ++k)
            for (int64_t h = 0; h < heads; ++h) total[h] += x[k * H + start + h];
        for (int64_t h = 0; h < heads; ++h) total[h] = 1 / total[h];
        for (int64_t k = 0; k < num; ++k)
            for (int64_t h = 0; h < heads; ++h) x[k * H + start + h] *= total[h];
    }
}

// The shares of scores; or, where there are no scores, of leaky(of_sources[j] + of_targets[i]).
template <typename T>
void edge_softmax(const Rows& rows, const T* scores, const T* of_sources, const T* of_targets,
                  T slope, T* shares, int64_t H, int threads) {
    in_parts(rows, threads, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const int64_t begin = rows.indptr[row], num = rows.indptr[row + 1] - begin;
            if (num == 0) continue;
            T* x = shares + begin * H;
            if (scores)
                std::copy(scores + begin * H, scores + (begin + num) * H, x);
            else
                for (int64_t k = 0; k < num; ++k) {
                    const T* of_source = of_sources + rows.source(begin + k) * H;
                    for (int64_t h = 0; h < H; ++h)
                        x[k * H + h] = leaky(of_source[h] + of_targets[row * H + h], slope);
                }
            softmax(x, num, H);
        }
    });
}

// The gradients of the scores; with of_sources, those of the sums that leaky was applied to, and of
// each target, whose d_targets is the sum over its edges.
template <typename T>
void edge_softmax_backward(const Rows& rows, const T* grad, const T* shares, const T* of_sources,
                           const T* of_targets, T slope, T* d_scores, T* d_targets, int64_t H,
                           int threads) {
    in_parts(rows, threads, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const int64_t begin = rows.indptr[row], end = rows.indptr[row + 1];
            for (int64_t start = 0; start < H; start += HEADS) {
                const int64_t heads = std::min(HEADS, H - start);
                T mean[HEADS] = {}, total[HEADS] = {};
                for (int64_t k = begin; k < end; ++k) {
                    const T *share = shares + k * H + start, *d_share = grad + k * H + start;
                    for (int64_t h = 0; h < heads; ++h) mean[h] += share[h] * d_share[h];
                }
                for (int64_t k = begin; k < end; ++k) {
                    const T *share = shares + k * H + start, *d_share = grad + k * H + start;
                    T* d = d_scores + k * H + start;
                    for (int64_t h = 0; h < heads; ++h) d[h] = share[h] * (d_share[h] - mean[h]);
                    if (of_sources) {
                        const T* of_source = of_sources + rows.source(k) * H + start;
                        const T* of_target = of_targets + row * H + start;
                        for (int64_t h = 0; h < heads; ++h)
                            d[h] *= of_source[h] + of_target[h] > 0 ? T(1) : slope;
                    }
                    for (int64_t h = 0; h < heads; ++h) total[h] += d[h];
                }
                if (d_targets)
                    for (int64_t h = 0; h < heads; ++h) d_targets[row * H + start + h] = total[h];
            }
        }
    });
}

template <typename T>
struct Sums {  // y_i = sum of shares x_j, seen from the sources j
    Rows sources;
    const int64_t* edges;
    const T *shares, *grad, *x;
    T *d_shares, *d_x;
    int64_t H, c;
};

// Gradients for VECTORS vectors of channels of source j from `start` on, or for the first `left` of
// one vector: each gradient of a target is read once, for both. All belong to one head, or,
// BY_VECTOR, each vector to a single one. Adds to d_shares.
template <int VECTORS, bool BY_VECTOR, typename T>
inline void attention_band(const Sums<T>& s, int64_t j, int64_t start, int64_t left) {
    const int64_t C = s.H * s.c, width = WIDTH<T>, last = s.sources.indptr[j + 1];
    const auto part = [left](const T* from, int v) {
        return VECTORS > 1 ? load(from + v * WIDTH<T>) : load(from, left);
    };
    Vector<T> own[VECTORS], total[VECTORS] = {};
    for (int v = 0; v < VECTORS; ++v) own[v] = part(s.x + j * C + start, v);
    for (int64_t k = s.sources.indptr[j]; k < last; ++k) {
        fetch_ahead<VECTORS>(s.sources, k, last, s.grad + start, C);
        const T* from = s.grad + s.sources.source(k) * C + start;
        const T* share = s.shares + s.edges[k] * s.H;
        T* d_share = s.d_shares + s.edges[k] * s.H;
        Vector<T> products = {};
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t head = (start + (BY_VECTOR ? v * width : 0)) / s.c;
            const Vector<T> g = part(from, v);
            total[v] += share[head] * g;
            products += g * own[v];
            if (BY_VECTOR) {
                d_share[head] += ::sum<T>(products);
                products = Vector<T>{};
            }
        }
        if (!BY_VECTOR) d_share[start / s.c] += ::sum<T>(products);
    }
    for (int v = 0; v < VECTORS; ++v)
        store<T>(s.d_x + j * C + start + v * width, total[v], VECTORS > 1 ? width : left);
}

template <bool BY_VECTOR, typename T>
void attention_rows(const Sums<T>& s, int64_t first, int64_t last, int64_t start, int64_t end) {
    for (int64_t j = first; j < last; ++j)
        in_bands<T>(start, end, [&](auto vectors, int64_t c, int64_t left) {
            attention_band<decltype(vectors)::value, BY_VECTOR>(s, j, c, left);
        });
}

template <typename T>
void attention_backward(const Sums<T>& s, int threads) {
    in_parts(s.sources, threads, [&](int64_t first, int64_t last) {
        if (s.H > 1 && s.c % WIDTH<T> == 0)
            attention_rows<true>(s, first, last, 0, s.H * s.c);
        else
            for (int64_t h = 0; h < s.H; ++h)
                attention_rows<false>(s, first, last, h * s.c, (h + 1) * s.c);
    });
}

// Scores of Brody et al. (arXiv:2105.14491): the product of `weights` (H c) with leaky(left_j +
// right_i), for each head.
template <typename T>
void scores(const Rows& rows, const T* left, const T* right, const T* weights, T slope, T* to,
            int64_t H, int64_t c, int threads) {
    const int64_t C = H * c, width = WIDTH<T>;
    in_parts(rows, threads, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row)
            for (int64_t k = rows.indptr[row]; k < rows.indptr[row + 1]; ++k) {
                const T* from = left + rows.source(k) * C;
                for (int64_t h = 0; h < H; ++h) {
                    Vector<T> total = {};
                    const int64_t end = (h + 1) * c;
                    for (int64_t i = h * c; i < end; i += width) {
                        const int64_t num = end - i;
                        Vector<T> z = load(from + i, num) + load(right + row * C + i, num);
                        total += load(weights + i, num) * (z > 0 ? z : z * slope);
                    }
                    to[k * H + h] = ::sum<T>(total);
                }
            }
    });
}

// Gradients of these scores for the nodes that the rows belong to: `own` are the features of these
// nodes, `others` those at the other ends. With d_weights, (PARTS, C) zeros, also those of the
// weights, in parts that do not depend on the number of threads.
template <typename T>
void scores_backward(const Rows& rows, const int64_t* edges, const T* d_scores, const T* own,
                     const T* others, const T* weights, T slope, T* d_own, T* d_weights,
                     int64_t H, int64_t c, int threads) {
    const int64_t C = H * c, width = WIDTH<T>;
    in_parts(rows, PARTS, threads, [&](int64_t first, int64_t last, int part) {
        T* d_part = d_weights ? d_weights + part * C : nullptr;
        for (int64_t row = first; row < last; ++row) {
            const T* of_row = own + row * C;
            T* d_row = d_own + row * C;
            std::fill(d_row, d_row + C, T(0));
            for (int64_t k = rows.indptr[row]; k < rows.indptr[row + 1]; ++k) {
                const T* other = others + rows.source(k) * C;
                const T* d_score = d_scores + (edges ? edges[k] : k) * H;
                for (int64_t h = 0; h < H; ++h) {
                    const int64_t end = (h + 1) * c;
                    for (int64_t i = h * c; i < end; i += width) {
                        const int64_t num = end - i;
                        const Vector<T> z = load(of_row + i, num) + load(other + i, num);
                        const Vector<T> slopes = z > 0 ? all(T(1)) : all(slope);
                        const Vector<T> d = d_score[h] * slopes;
                        store<T>(d_row + i, load(d_row + i, num) + d * load(weights + i, num), num);
                        if (d_part) store<T>(d_part + i, load(d_part + i, num) + d * z, num);
                    }
                }
            }
        }
    });
}

}  // namespace

#define ATTENTION(T, NAME)                                                                         \
    extern "C" void vigpipe_edge_softmax_##NAME(                                                   \
        const int64_t* indptr, const int64_t* indices, const T* scores, const T* of_sources,       \
        const T* of_targets, double slope, T* shares, int64_t m, int64_t H, int threads) {         \
        edge_softmax({indptr, indices, m}, scores, of_sources, of_targets, T(slope), shares, H,    \
                     threads);                                                                     \
    }                                                                                              \
    extern "C" void vigpipe_edge_softmax_backward_##NAME(                                          \
        const int64_t* indptr, const int64_t* indices, const T* grad, const T* shares,             \
        const T* of_sources, const T* of_targets, double slope, T* d_scores, T* d_targets,         \
        int64_t m, int64_t H, int threads) {                                                       \
        edge_softmax_backward({indptr, indices, m}, grad, shares, of_sources, of_targets,          \
                              T(slope), d_scores, d_targets, H, threads);                          \
    }                                                                                              \
    extern "C" void vigpipe_attention_backward_##NAME(                                             \
        const int64_t* indptr, const int64_t* indices, const int64_t* edges, const T* shares,      \
        const T* grad, const T* x, T* d_shares, T* d_x, int64_t n, int64_t H, int64_t c,           \
        int threads) {                                                                             \
        attention_backward(                                                                        \
            Sums<T>{{indptr, indices, n}, edges, shares, grad, x, d_shares, d_x, H, c}, threads);  \
    }                                                                                              \
    extern "C" void vigpipe_pair_scores_##NAME(                                                    \
        const int64_t* indptr, const int64_t* indices, const T* left, const T* right,              \
        const T* weights, double slope, T* to, int64_t m, int64_t H, int64_t c, int threads) {     \
        scores({indptr, indices, m}, left, right, weights, T(slope), to, H, c, threads);           \
    }                                                                                              \
    extern "C" void vigpipe_pair_scores_backward_##NAME(                                           \
        const int64_t* indptr, const int64_t* indices, const int64_t* edges, const T* d_scores,    \
        const T* own, const T* others, const T* weights, double slope, T* d_own, T* d_weights,     \
        int64_t m, int64_t H, int64_t c, int threads) {                                            \
        scores_backward({indptr, indices, m}, edges, d_scores, own, others, weights, T(slope),     \
                        d_own, d_weights, H, c, threads);                                          \
    }

ATTENTION(float, float32)
ATTENTION(double, float64)
