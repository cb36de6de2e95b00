// The transpose of a sparse graph, and whether that is the graph itself.
#include <algorithm>
#include <cstdint>
#include <vector>

// Turns every edge round. Edge k of the result is edge edges[k] of the graph; its rows, of the n
// sources, list the targets in ascending order. `turned_indices` or `edges` may be null.
extern "C" void vigpipe_csr_transpose(const int64_t* indptr, const int64_t* indices,
                                      int64_t* turned_indptr, int64_t* turned_indices,
                                      int64_t* edges, int64_t m, int64_t n) {
    std::fill(turned_indptr, turned_indptr + n + 1, 0);
    for (int64_t k = 0; k < indptr[m]; ++k) ++turned_indptr[indices[k] + 1];
    for (int64_t j = 0; j < n; ++j) turned_indptr[j + 1] += turned_indptr[j];
    std::vector<int64_t> next(turned_indptr, turned_indptr + n);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t k = indptr[i]; k < indptr[i + 1]; ++k) {
            const int64_t place = next[indices[k]]++;
            if (turned_indices) turned_indices[place] = i;
            if (edges) edges[place] = k;
        }
}

// Whether every edge has its reverse, in a graph whose rows ascend: the transpose is made, but each
// entry is only compared.
extern "C" int vigpipe_csr_is_symmetric(const int64_t* indptr, const int64_t* indices, int64_t n) {
    std::vector<int64_t> next(indptr, indptr + n);
    for (int64_t i = 0; i < n; ++i)
        for (int64_t k = indptr[i]; k < indptr[i + 1]; ++k) {
            const int64_t source = indices[k], place = next[source]++;
            if (place >= indptr[source + 1] || indices[place] != i) return 0;
        }
    return 1;
}
