// The maximum over the edges of a sparse graph, for every channel, and its gradient.
//
//     x (n, C)   y (m, C)   winners (m, C): the node whose feature is the maximum; -1 without edges
#include "csr.h"

namespace {

constexpr int64_t BAND = 64;  // channels of a gradient that one thread adds up

template <bool WINNERS, typename T>
void max_band(const Rows& rows, int64_t row, const T* x, T* y, int32_t* winners, int64_t C,
              int64_t c, int64_t left) {
    using I = Whole<T>;
    const int64_t first = rows.indptr[row], last = rows.indptr[row + 1];
    Vector<T> top = {};
    I winner = I{} - 1;
    for (int64_t edge = first; edge < last; ++edge) {
        const int64_t source = rows.source(edge);
        const Vector<T> value = load(x + source * C + c, left);
        const I better = edge == first ? I{} - 1 : ~(value <= top) & (top == top);
        top = better ? value : top;  // the first NaN stays
        if (WINNERS) winner = better ? I{} + static_cast<int32_t>(source) : winner;
    }
    store<T>(y + row * C + c, top, left);
    if (WINNERS)
        for (int64_t i = 0; i < left; ++i)
            winners[row * C + c + i] = static_cast<int32_t>(winner[i]);
}

template <bool WINNERS, typename T>
void max(const Rows& rows, const T* x, T* y, int32_t* winners, int64_t C, int threads) {
    in_parts(rows, threads, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row)
            for (int64_t c = 0; c < C; c += WIDTH<T>)
                max_band<WINNERS>(rows, row, x, y, winners, C, c,
                                  std::min<int64_t>(WIDTH<T>, C - c));
    });
}

// Adds the gradient (m, C) to d_x (n, C), which holds zeros, where the winners are. A thread has
// channels of its own, and takes the rows in order.
template <typename T>
void max_backward(const T* grad, const int32_t* winners, T* d_x, int64_t m, int64_t C,
                  int threads) {
    const int64_t band = std::max<int64_t>(LINE / sizeof(T), std::min(BAND, C / threads));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < C; start += band) {
        const int64_t end = std::min(start + band, C);
        for (int64_t place = 0; place < m * C; place += C)
            for (int64_t c = start; c < end; ++c)
                if (winners[place + c] >= 0) d_x[winners[place + c] * C + c] += grad[place + c];
    }
}

}  // namespace

#define MAX(T, NAME)                                                                               \
    extern "C" void vigpipe_csr_max_##NAME(const int64_t* indptr, const int64_t* indices,          \
                                           const T* x, T* y, int32_t* winners, int64_t m,          \
                                           int64_t C, int threads) {                               \
        const Rows rows = {indptr, indices, m};                                                    \
        winners ? max<true>(rows, x, y, winners, C, threads)                                       \
                : max<false>(rows, x, y, winners, C, threads);                                     \
    }                                                                                              \
    extern "C" void vigpipe_csr_max_backward_##NAME(const T* grad, const int32_t* winners, T* d_x, \
                                                    int64_t m, int64_t C, int threads) {           \
        max_backward(grad, winners, d_x, m, C, threads);                                           \
    }

MAX(float, float32)
MAX(double, float64)
