// GELU of features where they are, behind products whose own kernels would take longer for it.
#include "vector.h"

namespace {

// Computes it for NUM vectors, which take every step together.
template <int NUM>
INLINED void apply(float* x) {
    Vector<float> z[NUM];
    for (int i = 0; i < NUM; ++i) z[i] = load(x + i * WIDTH<float>);
    gelu<NUM>(z, z, static_cast<Vector<float>*>(nullptr));
    for (int i = 0; i < NUM; ++i) store<float>(x + i * WIDTH<float>, z[i]);
}

void apply_to_rest(float* x, int64_t num) {
    for (int64_t i = 0; i < num; i += WIDTH<float>) {
        Vector<float> z = load(x + i, num - i);
        gelu<1>(&z, &z, static_cast<Vector<float>*>(nullptr));
        store<float>(x + i, z, num - i);
    }
}

}  // namespace

extern "C" void vigpipe_gelu(float* x, int64_t num, int threads) {
    constexpr int VECTORS = 4;
    constexpr int64_t STEP = VECTORS * WIDTH<float>;
#pragma omp parallel num_threads(threads)
    {
        const NoDenormals during;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num; i += STEP) {
            if (num - i >= STEP)
                apply<VECTORS>(x + i);
            else
                apply_to_rest(x + i, num - i);
        }
    }
}
