// A wide hidden layer between few channels: y = gelu(x A + a) B, forward and backward.
//
//     x (R, F)   A (F, H)   a (H)   B (O, H)   y (R, O)      F and O are 3 or 7, H is hundreds
//
// Vectors run along H, and a few numbers of x are broadcast. The forward keeps the hidden layer of
// ROWS rows in registers. The backward computes it again, keeps it and its gradient for STRIP
// channels in the first-level cache, and then sums each kind of gradient in registers. Only x and y
// are read and written, so the arithmetic, most of it GELU's, limits the speed.
#include <vector>

#include "vector.h"

namespace {

constexpr int ROWS = 8;          // rows that take every step together
constexpr int64_t STRIP = 256;   // channels of the hidden layer that stay in the cache
constexpr int64_t CHUNK = 2048;  // rows of a partial sum and of a thread's share: the same for any threads

// z = x A + a, for N rows and the vector of channels at h.
template <typename T, int F, int N>
INLINED void first_layer(const T* x, const T* A, const T* a, Vector<T>* z, int64_t H, int64_t h) {
    for (int n = 0; n < N; ++n) z[n] = load(a + h);
    for (int f = 0; f < F; ++f) {
        const Vector<T> first = load(A + f * H + h);
        for (int n = 0; n < N; ++n) z[n] += x[n * F + f] * first;
    }
}

template <typename T, int F, int O, int N>
INLINED void forward_rows(const T* x, const T* A, const T* a, const T* B, T* y, int64_t H) {
    using V = Vector<T>;
    V sums[N][O] = {};
    for (int64_t h = 0; h < H; h += WIDTH<T>) {
        V z[N], g[N];
        first_layer<T, F, N>(x, A, a, z, H, h);
        gelu<N>(z, g, static_cast<V*>(nullptr));
        for (int o = 0; o < O; ++o) {
            const V second = load(B + o * H + h);
            for (int n = 0; n < N; ++n) sums[n][o] += g[n] * second;
        }
    }
    for (int n = 0; n < N; ++n)
        for (int o = 0; o < O; ++o) y[n * O + o] = sum<T>(sums[n][o]);
}

template <typename T, int F, int O>
void forward(const T* x, const T* A, const T* a, const T* B, T* y, int64_t R, int64_t H,
             int threads) {
    const int64_t num_chunks = (R + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const NoDenormals during;
        const int64_t end = (chunk + 1) * CHUNK < R ? (chunk + 1) * CHUNK : R;
        int64_t r = chunk * CHUNK;
        for (; r + ROWS <= end; r += ROWS)
            forward_rows<T, F, O, ROWS>(x + r * F, A, a, B, y + r * O, H);
        for (; r < end; ++r) forward_rows<T, F, O, 1>(x + r * F, A, a, B, y + r * O, H);
    }
}

// The hidden layer `g` of N rows and its gradient `dz`, for the channels from `start` to `end`.
template <typename T, int F, int O, int N, int W>
INLINED void strip(const T* x, const T* grad, const T* A, const T* a, const T* B,
                   Vector<T> (*g)[W], Vector<T> (*dz)[W], int64_t H, int64_t start, int64_t end) {
    using V = Vector<T>;
    for (int64_t h = start, i = 0; h < end; h += WIDTH<T>, ++i) {
        V z[N], value[N], slope[N], d[N];
        first_layer<T, F, N>(x, A, a, z, H, h);
        gelu<N>(z, value, slope);
        for (int n = 0; n < N; ++n) d[n] = grad[n * O] * load(B + h);
        for (int o = 1; o < O; ++o) {
            const V second = load(B + o * H + h);
            for (int n = 0; n < N; ++n) d[n] += grad[n * O + o] * second;
        }
        for (int n = 0; n < N; ++n) {
            g[n][i] = value[n];
            dz[n][i] = d[n] * slope[n];
        }
    }
}

// Adds the gradients of the weights from N rows and one strip.
template <typename T, int F, int O, int N, int W>
INLINED void add_to_weights(const T* x, const T* grad, const Vector<T> (*g)[W],
                            const Vector<T> (*dz)[W], T* dA, T* da, T* dB, int64_t H, int64_t start,
                            int64_t end) {
    using V = Vector<T>;
    for (int64_t h = start, i = 0; h < end; h += WIDTH<T>, ++i) {
        V d_first[F], d_second[O], d_bias = load(da + h);
        for (int f = 0; f < F; ++f) d_first[f] = load(dA + f * H + h);
        for (int o = 0; o < O; ++o) d_second[o] = load(dB + o * H + h);
        for (int n = 0; n < N; ++n) {
            const V d = dz[n][i];
            d_bias += d;
            for (int f = 0; f < F; ++f) d_first[f] += x[n * F + f] * d;
            for (int o = 0; o < O; ++o) d_second[o] += grad[n * O + o] * g[n][i];
        }
        for (int f = 0; f < F; ++f) store<T>(dA + f * H + h, d_first[f]);
        for (int o = 0; o < O; ++o) store<T>(dB + o * H + h, d_second[o]);
        store<T>(da + h, d_bias);
    }
}

// Adds the gradients of M rows from one strip.
template <typename T, int F, int M, int W>
INLINED void add_to_rows(const T* A, const Vector<T> (*dz)[W], Vector<T> (*sums)[F], int64_t H,
                         int64_t start, int64_t end) {
    Vector<T> own[M][F];
    for (int m = 0; m < M; ++m)
        for (int f = 0; f < F; ++f) own[m][f] = sums[m][f];
    for (int64_t h = start, i = 0; h < end; h += WIDTH<T>, ++i)
        for (int f = 0; f < F; ++f) {
            const Vector<T> first = load(A + f * H + h);
            for (int m = 0; m < M; ++m) own[m][f] += dz[m][i] * first;
        }
    for (int m = 0; m < M; ++m)
        for (int f = 0; f < F; ++f) sums[m][f] = own[m][f];
}

template <typename T, int F, int O, int N>
INLINED void backward_rows(const T* x, const T* grad, const T* A, const T* a, const T* B, T* dx,
                           T* dA, T* da, T* dB, int64_t H) {
    using V = Vector<T>;
    constexpr int AT_ONCE = N == 1 ? 1 : F == 3 ? 4 : 2;  // rows whose sums fit the registers
    V g[N][STRIP / WIDTH<T>], dz[N][STRIP / WIDTH<T>], sums[N][F] = {};
    for (int64_t start = 0; start < H; start += STRIP) {
        const int64_t end = start + STRIP < H ? start + STRIP : H;
        strip<T, F, O, N>(x, grad, A, a, B, g, dz, H, start, end);
        add_to_weights<T, F, O, N>(x, grad, g, dz, dA, da, dB, H, start, end);
        for (int n = 0; n < N; n += AT_ONCE)
            add_to_rows<T, F, AT_ONCE>(A, dz + n, sums + n, H, start, end);
    }
    for (int n = 0; n < N; ++n)
        for (int f = 0; f < F; ++f) dx[n * F + f] = sum<T>(sums[n][f]);
}

template <typename T, int F, int O>
void backward(const T* grad, const T* x, const T* A, const T* a, const T* B, T* dx, T* dA, T* da,
              T* dB, int64_t R, int64_t H, int threads) {
    const int64_t num_chunks = (R + CHUNK - 1) / CHUNK, size = (F + 1 + O) * H;
    std::vector<T> partial(num_chunks * size, T(0));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const NoDenormals during;  // which gradients of a far tail would be
        T* d_first = partial.data() + chunk * size;
        T *d_bias = d_first + F * H, *d_second = d_bias + H;
        const int64_t end = (chunk + 1) * CHUNK < R ? (chunk + 1) * CHUNK : R;
        int64_t r = chunk * CHUNK;
        for (; r + ROWS <= end; r += ROWS)
            backward_rows<T, F, O, ROWS>(x + r * F, grad + r * O, A, a, B, dx + r * F, d_first,
                                         d_bias, d_second, H);
        for (; r < end; ++r)
            backward_rows<T, F, O, 1>(x + r * F, grad + r * O, A, a, B, dx + r * F, d_first, d_bias,
                                      d_second, H);
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
