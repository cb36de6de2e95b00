// BatchNorm, GELU and residual together: y = r + s_b act(scale (x - mean) + shift), channels last.
//
//     x, y, r (R, C)   mean, variance (C) double   s (images), one factor for R / images rows
//
// x and its gradient are of type X; y, r and the gradient of y of type Y. The forward makes one pass
// for the statistics and one for the result. The backward makes one pass for the sums over the
// gradient of the norm's output, and one for the gradient of x. Partial sums are taken over CHUNK
// rows, so they do not depend on the number of threads.
#include <algorithm>
#include <memory>
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

// Two sums over the rows, of every channel.
template <typename T>
struct Sums {
    const Shape& shape;
    std::vector<T> partial;  // (chunks, 2, channels)

    explicit Sums(const Shape& shape_)
        : shape(shape_), partial(shape_.chunks() * 2 * shape_.channels) {}

    T* first(int64_t chunk) { return &partial[chunk * 2 * shape.channels]; }
    T* second(int64_t chunk) { return first(chunk) + shape.channels; }

    // Adds up the chunks in double precision, and over repeats too: (2, C).
    std::vector<double> total() const {
        const int64_t C = shape.channels / shape.repeats;
        std::vector<double> sums(2 * C, 0.0);
        for (int64_t row = 0; row < 2 * shape.chunks(); ++row)
            for (int64_t c = 0; c < shape.channels; ++c)
                sums[row % 2 * C + c % C] += partial[row * shape.channels + c];
        return sums;
    }
};

template <typename T>
inline void add(T* to, Vector<T> v, int64_t left) {
    store<T>(to, load(to, left) + v, left);
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

// What both directions know of a norm.
template <typename X>
struct Norm {
    const X* x;
    const Number<X>*weight, *bias;
    double eps;
    const Number<X>* sample_scale;
    double *mean, *variance;
    int64_t R, C;
    int threads;

    void set(Affine<Number<X>>& map, int64_t c) const {
        const double scale = weight[c] / std::sqrt(variance[c] + eps);
        map.set(c, C, scale, bias[c] - mean[c] * scale);
    }
};

template <typename X>
void statistics(const Norm<X>& norm, const Shape& shape) {
    using T = Number<X>;
    const int64_t width = shape.channels;
    Sums<T> sums(shape);
    std::vector<T> origin(width);  // near the mean, so squares stay small
    for (int64_t c = 0; c < width; ++c) origin[c] = number(norm.x[c % norm.C]);
#pragma omp parallel for num_threads(norm.threads) schedule(static)
    for (int64_t chunk = 0; chunk < shape.chunks(); ++chunk) {
        T *total = sums.first(chunk), *squares = sums.second(chunk);
        for (int64_t r = shape.first(chunk); r < shape.last(chunk); ++r)
            for (int64_t c = 0; c < width; c += WIDTH<T>) {
                const int64_t left = width - c;
                const Vector<T> d = load(norm.x + r * width + c, left) - load(&origin[c], left);
                add(total + c, d, left);
                add(squares + c, d * d, left);
            }
    }
    const std::vector<double> total = sums.total();
    for (int64_t c = 0; c < norm.C; ++c) {
        const double shift = total[c] / norm.R;
        const double deviation = total[norm.C + c] / norm.R - shift * shift;
        norm.mean[c] = origin[c] + shift;
        norm.variance[c] = deviation < 0 ? 0 : deviation;  // keeps NaN
    }
}

template <bool GELU, typename X, typename Y>
void forward(const Norm<X>& norm, const Shape& shape, const Y* residual, Y* y) {
    using T = Number<X>;
    const int64_t width = shape.channels;
    statistics(norm, shape);
    Affine<T> map(shape);
    for (int64_t c = 0; c < norm.C; ++c) norm.set(map, c);
#pragma omp parallel for num_threads(norm.threads) schedule(static)
    for (int64_t r = 0; r < shape.rows; ++r) {
        const T share = norm.sample_scale ? norm.sample_scale[r / shape.rows_per_image] : T(1);
        for (int64_t c = 0; c < width; c += WIDTH<T>) {
            const int64_t left = width - c, at = r * width + c;
            Vector<T> z = map(load(norm.x + at, left), c, left);
            if constexpr (GELU) gelu<1>(&z, &z, static_cast<Vector<T>*>(nullptr));
            if (residual) z = load(residual + at, left) + share * z;
            store<Y>(y + at, z, left);
        }
    }
}

template <bool GELU, typename X, typename Y>
void backward(const Norm<X>& norm, const Shape& shape, const Y* grad, X* dx, Number<X>* d_weight,
              Number<X>* d_bias) {
    using T = Number<X>;
    const int64_t width = shape.channels;
    Affine<T> map(shape), unit(shape);
    for (int64_t c = 0; c < norm.C; ++c) {
        norm.set(map, c);
        const double scale = 1 / std::sqrt(norm.variance[c] + norm.eps);
        unit.set(c, norm.C, scale, -norm.mean[c] * scale);
    }
    // The gradient of the norm's output takes long to compute if there is a GELU. So it is kept for
    // the second pass, in dx if that is as precise.
    constexpr bool IS_WIDE = std::is_same_v<X, T>;
    const std::unique_ptr<T[]> memory(GELU && !IS_WIDE ? new T[shape.rows * width] : nullptr);
    T* kept = memory.get();
    if constexpr (IS_WIDE) kept = dx;
    Sums<T> sums(shape);
#pragma omp parallel for num_threads(norm.threads) schedule(static)
    for (int64_t chunk = 0; chunk < shape.chunks(); ++chunk) {
        T *total = sums.first(chunk), *products = sums.second(chunk);
        for (int64_t r = shape.first(chunk); r < shape.last(chunk); ++r) {
            const T share = norm.sample_scale ? norm.sample_scale[r / shape.rows_per_image] : T(1);
            for (int64_t c = 0; c < width; c += WIDTH<T>) {
                const int64_t left = width - c, at = r * width + c;
                const Vector<T> value = load(norm.x + at, left);
                Vector<T> dz = share * load(grad + at, left);
                if constexpr (GELU) {
                    Vector<T> z = map(value, c, left), slope;
                    gelu<1>(&z, &z, &slope);
                    dz *= slope;
                    store<T>(kept + at, dz, left);
                }
                add(total + c, dz, left);
                add(products + c, dz * unit(value, c, left), left);
            }
        }
    }
    const std::vector<double> total = sums.total();
    Affine<T> of_statistics(shape);  // subtracted because the statistics depend on x
    for (int64_t c = 0; c < norm.C; ++c) {
        const double products = total[norm.C + c];
        d_bias[c] = static_cast<T>(total[c]);
        d_weight[c] = static_cast<T>(products);
        of_statistics.set(c, norm.C, products / norm.R, total[c] / norm.R);
    }
#pragma omp parallel for num_threads(norm.threads) schedule(static)
    for (int64_t r = 0; r < shape.rows; ++r) {
        const T share = norm.sample_scale ? norm.sample_scale[r / shape.rows_per_image] : T(1);
        for (int64_t c = 0; c < width; c += WIDTH<T>) {
            const int64_t left = width - c, at = r * width + c;
            const Vector<T> normed = unit(load(norm.x + at, left), c, left);
            Vector<T> dz = GELU ? load(kept + at, left) : share * load(grad + at, left);
            dz -= of_statistics(normed, c, left);
            store<X>(dx + at, dz * load(&map.factor[c], left), left);
        }
    }
}

}  // namespace

#define NORM(X, Y, NAME)                                                                           \
    extern "C" void vigpipe_norm_##NAME(                                                           \
        const X* x, const Number<X>* weight, const Number<X>* bias, double eps, const Y* residual, \
        const Number<X>* sample_scale, Y* y, double* mean, double* variance, int64_t R, int64_t C, \
        int64_t images, int gelu, int threads) {                                                   \
        const Norm<X> norm = {x, weight, bias, eps, sample_scale, mean, variance, R, C, threads};  \
        const Shape shape(R, C, images, WIDTH<X>);                                                 \
        (gelu ? forward<true, X, Y> : forward<false, X, Y>)(norm, shape, residual, y);             \
    }                                                                                              \
    extern "C" void vigpipe_norm_backward_##NAME(                                                  \
        const Y* grad, const X* x, double* mean, double* variance, const Number<X>* weight,        \
        const Number<X>* bias, double eps, const Number<X>* sample_scale, X* dx,                   \
        Number<X>* d_weight, Number<X>* d_bias, int64_t R, int64_t C, int64_t images, int gelu,    \
        int threads) {                                                                             \
        const Norm<X> norm = {x, weight, bias, eps, sample_scale, mean, variance, R, C, threads};  \
        const Shape shape(R, C, images, WIDTH<X>);                                                 \
        (gelu ? backward<true, X, Y> : backward<false, X, Y>)(norm, shape, grad, dx, d_weight,     \
                                                              d_bias);                             \
    }

NORM(float, float, float32)
NORM(double, double, float64)
NORM(BFloat16, BFloat16, bfloat16)
NORM(BFloat16, float, bfloat16_float32)
