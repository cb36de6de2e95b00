// A wide hidden layer between few channels: y = gelu(x A + a) B, forward and backward.
//
//     x (R, F)   A (F, H)   a (H)   B (O, H)   y (R, O)      F and O are 3 or 7, H is hundreds
//
// The hidden layer is kept in registers: vectors run along H, and a few numbers of x are broadcast.
// The backward computes it again. Only x and y are read and written, so the arithmetic, most of it
// GELU's, limits the speed.
#include <vector>

#include "vector.h"

namespace {

constexpr int TILE = 32;          // rows whose sums over H fit the first-level cache
constexpr int64_t CHUNK = 2048;  // rows of one partial sum: the same for any number of threads

template <typename T, int F, int O>
void forward(const T* x, const T* A, const T* a, const T* B, T* y, int64_t R, int64_t H,
             int threads) {
    using V = Vector<T>;
    const int64_t num_tiles = (R + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t start = tile * TILE;
        const int rows = static_cast<int>(R - start < TILE ? R - start : TILE);
        V sums[TILE][O] = {};
        for (int64_t h = 0; h < H; h += WIDTH<T>) {
            V first[F], second[O];
            for (int f = 0; f < F; ++f) first[f] = load(A + f * H + h);
            for (int o = 0; o < O; ++o) second[o] = load(B + o * H + h);
            const V bias = load(a + h);
            for (int n = 0; n < rows; ++n) {
                const T* row = x + (start + n) * F;
                V z = bias;
                for (int f = 0; f < F; ++f) z += row[f] * first[f];
                const V g = z * gaussian(z).cumulative;
                for (int o = 0; o < O; ++o) sums[n][o] += g * second[o];
            }
        }
        for (int n = 0; n < rows; ++n)
            for (int o = 0; o < O; ++o) y[(start + n) * O + o] = sum<T>(sums[n][o]);
    }
}

// Adds the gradients of one tile of rows and one strip of H: of the weights, and (in `sums`) of the
// rows.
template <typename T, int F, int O>
inline void backward_strip(const T* x, const T* grad, int rows, const T* A, const T* a, const T* B,
                           T* dA, T* da, T* dB, Vector<T> (*sums)[F], int64_t H, int64_t h) {
    using V = Vector<T>;
    V first[F], second[O], d_first[F], d_second[O];
    for (int f = 0; f < F; ++f) first[f] = load(A + f * H + h);
    for (int o = 0; o < O; ++o) second[o] = load(B + o * H + h);
    for (int f = 0; f < F; ++f) d_first[f] = load(dA + f * H + h);
    for (int o = 0; o < O; ++o) d_second[o] = load(dB + o * H + h);
    const V bias = load(a + h);
    V d_bias = load(da + h);
    for (int n = 0; n < rows; ++n) {
        const T* row = x + n * F;
        const T* dy = grad + n * O;
        V z = bias;
        for (int f = 0; f < F; ++f) z += row[f] * first[f];
        const Gaussian<T> normal = gaussian(z);
        const V g = z * normal.cumulative;
        V dz = {};
        for (int o = 0; o < O; ++o) {
            d_second[o] += dy[o] * g;
            dz += dy[o] * second[o];
        }
        dz *= normal.cumulative + z * normal.density;
        d_bias += dz;
        for (int f = 0; f < F; ++f) {
            d_first[f] += row[f] * dz;
            sums[n][f] += dz * first[f];
        }
    }
    for (int f = 0; f < F; ++f) store<T>(dA + f * H + h, d_first[f]);
    for (int o = 0; o < O; ++o) store<T>(dB + o * H + h, d_second[o]);
    store<T>(da + h, d_bias);
}

template <typename T, int F, int O>
void backward(const T* grad, const T* x, const T* A, const T* a, const T* B, T* dx, T* dA, T* da,
              T* dB, int64_t R, int64_t H, int threads) {
    using V = Vector<T>;
    const int64_t num_chunks = (R + CHUNK - 1) / CHUNK, size = (F + 1 + O) * H;
    std::vector<T> partial(num_chunks * size, T(0));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        T* own = partial.data() + chunk * size;
        const int64_t end = (chunk + 1) * CHUNK < R ? (chunk + 1) * CHUNK : R;
        for (int64_t start = chunk * CHUNK; start < end; start += TILE) {
            const int rows = static_cast<int>(end - start < TILE ? end - start : TILE);
            V sums[TILE][F] = {};
            for (int64_t h = 0; h < H; h += WIDTH<T>)
                backward_strip<T, F, O>(x + start * F, grad + start * O, rows, A, a, B, own,
                                        own + F * H, own + (F + 1) * H, sums, H, h);
            for (int n = 0; n < rows; ++n)
                for (int f = 0; f < F; ++f) dx[(start + n) * F + f] = sum<T>(sums[n][f]);
        }
    }
    for (int64_t i = 0; i < size; ++i) {
        double total = 0;
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) total += partial[chunk * size + i];
        T* to = i < F * H ? dA + i : i < (F + 1) * H ? da + (i - F * H) : dB + (i - (F + 1) * H);
        *to = static_cast<T>(total);
    }
}

}  // namespace

#define HIDDEN(T, F, NAME)                                                                         \
    extern "C" void vigpipe_hidden_##F##_##NAME(const T* x, const T* A, const T* a, const T* B,    \
                                                T* y, int64_t R, int64_t H, int threads) {         \
        forward<T, F, 3>(x, A, a, B, y, R, H, threads);                                            \
    }                                                                                              \
    extern "C" void vigpipe_hidden_backward_##F##_##NAME(                                          \
        const T* grad, const T* x, const T* A, const T* a, const T* B, T* dx, T* dA, T* da, T* dB, \
        int64_t R, int64_t H, int threads) {                                                       \
        backward<T, F, 3>(grad, x, A, a, B, dx, dA, da, dB, R, H, threads);                        \
    }

HIDDEN(float, 3, float32)
HIDDEN(float, 7, float32)
HIDDEN(double, 3, float64)
HIDDEN(double, 7, float64)
