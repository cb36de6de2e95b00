// Weighted sums over the edges of a sparse graph, and products of features along edges.
//
//     x (n, C) features   weights (e, H), a weight for each of H heads, which have C / H channels
//     each   y (m, C)   ldx, ldy: numbers from one row to the next
//
// No tensor of edges x channels is made: a row is summed in registers, a band of channels at a
// time, in the order of its edges, so the bits do not depend on the number of threads.
#include "csr.h"

namespace {

template <typename T>
struct Sum {
    Rows rows;
    const T *weights, *of_sources, *of_rows;  // factors of edges and of nodes; null: 1
    const T* x;
    int64_t ldx, heads, per_head;
    const T* added;  // (m, C) that is added last; null: nothing
    int64_t ld_added;
    T* y;
    int64_t ldy, C;

    T factor(int64_t edge, int64_t head, int64_t source) const {
        const T weight = weights ? weights[edge * heads + head] : T(1);
        return of_sources ? weight * of_sources[source] : weight;
    }
};

// Sums a row for VECTORS vectors of channels from c on, or for the first `left` of one vector. All
// belong to one head, or, BY_VECTOR, each vector to a head of its own.
template <int VECTORS, bool WEIGHTED, bool BY_VECTOR, typename T>
inline void sum_band(const Sum<T>& s, int64_t row, int64_t c, int64_t left) {
    using V = Vector<T>;
    const int64_t first = s.rows.indptr[row], last = s.rows.indptr[row + 1];
    V total[VECTORS] = {};
    for (int64_t edge = first; edge < last; ++edge) {
        fetch_ahead<VECTORS>(s.rows, edge, last, s.x + c, s.ldx);
        const int64_t source = s.rows.source(edge);
        const T* from = s.x + source * s.ldx + c;
        const T factor = WEIGHTED && !BY_VECTOR ? s.factor(edge, c / s.per_head, source) : T(1);
        for (int v = 0; v < VECTORS; ++v) {
            const V value = VECTORS > 1 ? load(from + v * WIDTH<T>) : load(from, left);
            if (BY_VECTOR)
                total[v] += s.factor(edge, (c + v * WIDTH<T>) / s.per_head, source) * value;
            else if (WEIGHTED)
                total[v] += factor * value;
            else
                total[v] += value;
        }
    }
    for (int v = 0; v < VECTORS; ++v, c += WIDTH<T>) {
        if (s.of_rows) total[v] *= s.of_rows[row];
        if (s.added) total[v] += load(s.added + row * s.ld_added + c, left);
        store<T>(s.y + row * s.ldy + c, total[v], left);
    }
}

template <bool WEIGHTED, bool BY_VECTOR, typename T>
void sum_rows(const Sum<T>& s, int64_t first, int64_t last, int64_t start, int64_t end) {
    for (int64_t row = first; row < last; ++row)
        in_bands<T>(start, end, [&](auto vectors, int64_t c, int64_t left) {
            sum_band<decltype(vectors)::value, WEIGHTED, BY_VECTOR>(s, row, c, left);
        });
}

template <typename T>
void sum(const Sum<T>& s, int threads) {
    const bool weighted = s.weights || s.of_sources;
    const bool by_vector = s.heads > 1 && s.per_head % WIDTH<T> == 0;
    in_parts(s.rows, threads, [&](int64_t first, int64_t last) {
        if (!weighted)
            sum_rows<false, false>(s, first, last, 0, s.C);
        else if (by_vector)
            sum_rows<true, true>(s, first, last, 0, s.C);
        else
            for (int64_t h = 0; h < s.heads; ++h)
                sum_rows<true, false>(s, first, last, h * s.per_head, (h + 1) * s.per_head);
    });
}

}  // namespace

#define SUM(T, NAME)                                                                               \
    extern "C" void vigpipe_csr_sum_##NAME(                                                        \
        const int64_t* indptr, const int64_t* indices, const T* weights, const T* of_sources,      \
        const T* of_rows, const T* x, const T* added, T* y, int64_t m, int64_t C, int64_t H,       \
        int64_t ldx, int64_t ld_added, int64_t ldy, int threads) {                                 \
        sum(Sum<T>{{indptr, indices, m}, weights, of_sources, of_rows, x, ldx, H, C / H, added,    \
                   ld_added, y, ldy, C},                                                           \
            threads);                                                                              \
    }

SUM(float, float32)
SUM(double, float64)
