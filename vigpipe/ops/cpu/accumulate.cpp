// Sums in float64 of float32 terms: one pass, where torch first writes the term in float64.
#include <cstdint>

// Adds `num` numbers to sums. First terms replace what the sums hold, so nobody needs to clear them.
extern "C" void vigpipe_accumulate(const float* term, double* sum, int64_t num, int is_first,
                                   int threads) {
    if (is_first) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
        for (int64_t i = 0; i < num; ++i) sum[i] = 0.0 + static_cast<double>(term[i]);
    } else {
#pragma omp parallel for simd num_threads(threads) schedule(static)
        for (int64_t i = 0; i < num; ++i) sum[i] += static_cast<double>(term[i]);
    }
}
