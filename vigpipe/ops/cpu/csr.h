// Edges of a sparse graph in compressed rows, and how their rows are shared among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "vector.h"

namespace {

constexpr int64_t LINE = 64;  // bytes of a cache line
constexpr int64_t AHEAD = 6;  // edges whose features are fetched before they are needed

struct Rows {
    const int64_t* indptr;   // row i has the edges indptr[i] ... indptr[i + 1] - 1
    const int64_t* indices;  // where each edge comes from; null: edge k from k
    int64_t num;
    int64_t source(int64_t edge) const { return indices ? indices[edge] : edge; }
};

// Calls work(first, last, part) for every part of the rows; parts have about equally many rows and
// edges together. Where they begin depends on their number only.
template <typename Work>
inline void in_parts(const Rows& rows, int num_parts, int threads, Work work) {
    const int64_t first = rows.indptr[0], total = rows.indptr[rows.num] - first + rows.num;
    const auto begin = [&](int part) {
        const int64_t before = total / num_parts * part + total % num_parts * part / num_parts;
        int64_t low = 0, high = rows.num;  // the first row with so many rows and edges before it
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (rows.indptr[middle] - first + middle < before)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    };
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int part = 0; part < num_parts; ++part)
        work(begin(part), part + 1 == num_parts ? rows.num : begin(part + 1), part);
}

// Calls work(first, last), for work whose result does not depend on the parts.
template <typename Work>
inline void in_parts(const Rows& rows, int threads, Work work) {
    in_parts(rows, threads == 1 ? 1 : 8 * threads, threads,
             [&](int64_t first, int64_t last, int) { work(first, last); });
}

// Calls use(vectors, c, left) for bands of the channels from `start` to `end`: for as many vectors as
// the constant `vectors` says from c on, or for the first `left` channels of one vector.
template <typename T, typename Use>
inline void in_bands(int64_t start, int64_t end, Use use) {
    const int64_t width = WIDTH<T>;
    int64_t c = start;
    for (; c + 8 * width <= end; c += 8 * width) use(std::integral_constant<int, 8>{}, c, width);
    for (; c + 4 * width <= end; c += 4 * width) use(std::integral_constant<int, 4>{}, c, width);
    for (; c + 2 * width <= end; c += 2 * width) use(std::integral_constant<int, 2>{}, c, width);
    for (; c < end; c += width) use(std::integral_constant<int, 1>{}, c, end - c);
}

// Fetches the features of an edge that comes soon, if the row has it.
template <int VECTORS, typename T>
inline void fetch_ahead(const Rows& rows, int64_t edge, int64_t last, const T* x, int64_t ldx) {
    if (edge + AHEAD >= last) return;
    const T* next = x + rows.source(edge + AHEAD) * ldx;
    for (int v = 0; v < VECTORS; ++v) __builtin_prefetch(next + v * WIDTH<T>);
}

}  // namespace
