// BatchNorm, GELU and residual together: y = r + s_b act(scale (x - mean) + shift), channels last.
//
//     x, y, r (R, C)   mean, variance (C) double   s (images), one factor for R / images rows
//
// The forward makes one pass for the statistics and one for the result. The backward makes one pass
// for the gradient of the norm's output and its sums, and one for the gradient of x. Partial sums
// are taken over CHUNK rows, so they do not depend on the number of threads.
#include <algorithm>
#include <numeric>
#include <vector>

#include "vector.h"

namespace {

constexpr int64_t CHUNK = 128;  // rows of a partial sum

// With too few channels to fill a vector, several rows are treated as one row of more channels.
struct Shape {
    int64_t rows, channels, repeats, rows_per_image;

    Shape(int64_t R, int64_t C, int64_t images, int64_t width) {
        const int64_t per_image = R / images;
        repeats = width / std::gcd(C, width);
        if (C >= 8 * width || per_image % repeats != 0) repeats = 1;
        rows = R / repeats;
        channels = C * repeats;
        rows_per_image = per_image / repeats;
    }
    int64_t chunks() const { return (rows + CHUNK - 1) / CHUNK; }
    int64_t first(int64_t chunk) const { return chunk * CHUNK; }
    int64_t last(int64_t chunk) const { return std::min((chunk + 1) * CHUNK, rows); }
};

// Adds the partial sums (chunks, 2, channels) in double precision, over repeats too: (2, C).
template <typename T>
std::vector<double> sum_chunks(const std::vector<T>& partial, const Shape& shape) {
    const int64_t C = shape.channels / shape.repeats;
    std::vector<double> total(2 * C, 0.0);
    for (int64_t row = 0; row < 2 * shape.chunks(); ++row)
        for (int64_t c = 0; c < shape.channels; ++c)
            total[row % 2 * C + c % C] += partial[row * shape.channels + c];
    return total;
}

// The map value -> factor[c] * value + summand[c] of channel c, for every repeat of the channels.
template <typename T>
struct Affine {
    std::vector<T> factor, summand;

    explicit Affine(const Shape& shape) : factor(shape.channels), summand(shape.channels) {}
    void set(int64_t c, int64_t C, double f, double s) {
        for (size_t i = c; i < factor.size(); i += C) {
            factor[i] = static_cast<T>(f);
            summand[i] = static_cast<T>(s);
        }
    }
    Vector<T> operator()(Vector<T> value, int64_t c, int64_t left) const {
        return value * load(&factor[c], left) + load(&summand[c], left);
    }
};

template <typename T>
void statistics(const T* x, double* mean, double* variance, int64_t R, int64_t C,
                const Shape& shape, int threads) {
    using V = Vector<T>;
    const int64_t width = shape.channels;
    std::vector<T> partial(shape.chunks() * 2 * width, T(0)), origin(width);
    for (int64_t c = 0; c < width; ++c) origin[c] = x[c % C];  // near the mean, so squares stay small
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < shape.chunks(); ++chunk) {
        T* sums = &partial[chunk * 2 * width];
        T* squares = sums + width;
        for (int64_t r = shape.first(chunk); r < shape.last(chunk); ++r)
            for (int64_t c = 0; c < width; c += WIDTH<T>) {
                const int64_t left = width - c;
                const V d = load(x + r * width + c, left) - load(&origin[c], left);
                store<T>(sums + c, load(sums + c, left) + d, left);
                store<T>(squares + c, load(squares + c, left) + d * d, left);
            }
    }
    const std::vector<double> total = sum_chunks(partial, shape);
    for (int64_t c = 0; c < C; ++c) {
        const double shift = total[c] / R, square = total[C + c] / R - shift * shift;
        mean[c] = x[c] + shift;
        variance[c] = square < 0 ? 0 : square;  // keeps NaN
    }
}

// Writes the norm as an affine map.
template <typename T>
Affine<T> norm_map(const double* mean, const double* variance, const T* weight, const T* bias,
                   double eps, int64_t C, const Shape& shape) {
    Affine<T> map(shape);
    for (int64_t c = 0; c < C; ++c) {
        const double scale = (weight ? weight[c] : T(1)) / std::sqrt(variance[c] + eps);
        map.set(c, C, scale, (bias ? bias[c] : T(0)) - mean[c] * scale);
    }
    return map;
}

template <typename T, bool GELU>
void forward(const T* x, const double* mean, const double* variance, const T* weight,
             const T* bias, double eps, const T* residual, const T* sample_scale, T* y, int64_t C,
             const Shape& shape, int threads) {
    using V = Vector<T>;
    const Affine<T> map = norm_map(mean, variance, weight, bias, eps, C, shape);
    const int64_t width = shape.channels;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < shape.rows; ++r) {
        const T share = sample_scale ? sample_scale[r / shape.rows_per_image] : T(1);
        for (int64_t c = 0; c < width; c += WIDTH<T>) {
            const int64_t left = width - c, at = r * width + c;
            V z = map(load(x + at, left), c, left);
            if constexpr (GELU) z *= gaussian(z).cumulative;
            if (residual) z = load(residual + at, left) + share * z;
            store<T>(y + at, z, left);
        }
    }
}

template <typename T, bool GELU>
void backward(const T* grad, const T* x, const double* mean, const double* variance,
              const T* weight, const T* bias, double eps, const T* sample_scale, T* dx, T* d_weight,
              T* d_bias, int64_t R, int64_t C, const Shape& shape, int threads) {
    using V = Vector<T>;
    const Affine<T> map = norm_map(mean, variance, weight, bias, eps, C, shape);
    const Affine<T> unit = norm_map<T>(mean, variance, nullptr, nullptr, eps, C, shape);
    const int64_t width = shape.channels;
    std::vector<T> partial(shape.chunks() * 2 * width, T(0));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < shape.chunks(); ++chunk) {
        T* sums = &partial[chunk * 2 * width];
        T* products = sums + width;
        for (int64_t r = shape.first(chunk); r < shape.last(chunk); ++r) {
            const T share = sample_scale ? sample_scale[r / shape.rows_per_image] : T(1);
            for (int64_t c = 0; c < width; c += WIDTH<T>) {
                const int64_t left = width - c, at = r * width + c;
                const V value = load(x + at, left);
                V dz = share * load(grad + at, left);
                if constexpr (GELU) {
                    const V z = map(value, c, left);
                    const Gaussian<T> normal = gaussian(z);
                    dz *= normal.cumulative + z * normal.density;
                }
                store<T>(sums + c, load(sums + c, left) + dz, left);
                store<T>(products + c, load(products + c, left) + dz * unit(value, c, left), left);
                store<T>(dx + at, dz, left);
            }
        }
    }
    const std::vector<double> total = sum_chunks(partial, shape);
    Affine<T> statistics_grad(shape);  // subtracted because the statistics depend on x
    for (int64_t c = 0; c < C; ++c) {
        d_bias[c] = static_cast<T>(total[c]);
        d_weight[c] = static_cast<T>(total[C + c]);
        statistics_grad.set(c, C, total[C + c] / R, total[c] / R);
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < shape.rows; ++r)
        for (int64_t c = 0; c < width; c += WIDTH<T>) {
            const int64_t left = width - c, at = r * width + c;
            const V normed = unit(load(x + at, left), c, left);
            const V dz = load(dx + at, left) - statistics_grad(normed, c, left);
            store<T>(dx + at, dz * load(&map.factor[c], left), left);
        }
}

}  // namespace

#define NORM(T, NAME)                                                                              \
    extern "C" void vigpipe_norm_##NAME(                                                           \
        const T* x, const T* weight, const T* bias, double eps, const T* residual,                 \
        const T* sample_scale, T* y, double* mean, double* variance, int64_t R, int64_t C,         \
        int64_t images, int gelu, int threads) {                                                   \
        const Shape shape(R, C, images, WIDTH<T>);                                                 \
        statistics(x, mean, variance, R, C, shape, threads);                                       \
        (gelu ? forward<T, true> : forward<T, false>)(x, mean, variance, weight, bias, eps,        \
                                                      residual, sample_scale, y, C, shape, threads);\
    }                                                                                              \
    extern "C" void vigpipe_norm_backward_##NAME(                                                  \
        const T* grad, const T* x, const double* mean, const double* variance, const T* weight,    \
        const T* bias, double eps, const T* sample_scale, T* dx, T* d_weight, T* d_bias, int64_t R,\
        int64_t C, int64_t images, int gelu, int threads) {                                        \
        const Shape shape(R, C, images, WIDTH<T>);                                                 \
        (gelu ? backward<T, true> : backward<T, false>)(grad, x, mean, variance, weight, bias,     \
                                                        eps, sample_scale, dx, d_weight, d_bias, R, C,\
                                                        shape, threads);                           \
    }

NORM(float, float32)
NORM(double, float64)
