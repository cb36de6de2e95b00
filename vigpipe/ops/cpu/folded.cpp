// A Linear on 3 channels and its BatchNorm, and the graph convolution after them, folded into one
// affine map of a node's features, in double precision: hidden.cpp computes what comes after.
//
//     x, total (R, 3)    W (H, 3)    b, gamma, beta, rel_bias (H)    rel, root (H, H)
//     BN(W x + b) = x into + offset,    into (3, H), offset (H)
//
// With a convolution, `total` are the sums of the neighbours, and the features (R, 7) are total, x
// and the number of neighbours: first (7, H) = [into rel^T; into root^T; offset rel^T], and bias
// (H) = offset root^T + rel_bias. Without one, the features are x, and the map is into and offset.
// The statistics that BN would measure follow from the mean m and the covariance S of x, which are
// `moments` (4, 3): W m + b and diag(W S W^T).
//
// Only the passes over x use several threads, with partial sums of CHUNK rows.
#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.h"

namespace {

constexpr int C = 3, F = 2 * C + 1, WIDE = WIDTH<double>;
constexpr int64_t CHUNK = 4096;
typedef Vector<double> Wide;  // a wider one would be taken apart in memory

typedef float Narrow __attribute__((vector_size(WIDE * sizeof(float))));

inline Wide widened(const float* from) {
    return __builtin_convertvector(read<Narrow>(from), Wide);
}
inline Wide widened(const double* from) { return read<Wide>(from); }

inline void narrowed(float* to, Wide v) {
    const Narrow narrow = __builtin_convertvector(v, Narrow);
    std::memcpy(to, &narrow, sizeof narrow);
}
inline void narrowed(double* to, Wide v) { std::memcpy(to, &v, sizeof v); }

inline double total_of(Wide v) {
    double total = 0;
    for (int i = 0; i < WIDE; ++i) total += v[i];
    return total;
}

// Calls add(row, sums) for every row, with sums of a chunk of rows, and adds the chunks up.
template <int NUM, typename Add>
void sum_rows(int64_t R, int threads, double* sums, Add add) {
    const int64_t num_chunks = (R + CHUNK - 1) / CHUNK;
    std::vector<double> partial(num_chunks * NUM, 0.0);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        double own[NUM] = {};
        for (int64_t r = chunk * CHUNK; r < std::min(R, (chunk + 1) * CHUNK); ++r) add(r, own);
        std::copy(own, own + NUM, &partial[chunk * NUM]);
    }
    std::fill(sums, sums + NUM, 0.0);
    for (int64_t i = 0; i < num_chunks * NUM; ++i) sums[i % NUM] += partial[i];
}

template <typename T>
void measure(const T* x, double* moments, int64_t R, int threads) {
    double sums[C], squares[6];
    sum_rows<C>(R, threads, sums, [=](int64_t r, double* own) {
        for (int c = 0; c < C; ++c) own[c] += x[r * C + c];
    });
    for (int c = 0; c < C; ++c) moments[c] = sums[c] / R;
    sum_rows<6>(R, threads, squares, [=](int64_t r, double* own) {
        const T* row = x + r * C;
        const double u = row[0] - moments[0], v = row[1] - moments[1], w = row[2] - moments[2];
        own[0] += u * u, own[1] += u * v, own[2] += u * w;
        own[3] += v * v, own[4] += v * w, own[5] += w * w;
    });
    const int place[C * C] = {0, 1, 2, 1, 3, 4, 2, 4, 5};
    for (int i = 0; i < C * C; ++i) moments[C + i] = squares[place[i]] / R;
}

// The map of Linear and BatchNorm: into (3, H) and offset (H), and what the norm counts.
template <typename T>
struct Folded {
    int64_t H;
    std::vector<double> into, offset, mean, variance;

    Folded(const T* W, const T* gamma, const T* beta, double eps, const double* moments, int64_t H)
        : H(H), into(C * H), offset(H), mean(H), variance(H) {
        for (int64_t h = 0; h < H; ++h) {
            mean[h] = variance[h] = 0;
            for (int c = 0; c < C; ++c) {
                mean[h] += W[h * C + c] * moments[c];
                double product = 0;
                for (int k = 0; k < C; ++k) product += moments[C + c * C + k] * W[h * C + k];
                variance[h] += W[h * C + c] * product;
            }
            const double scale = gamma[h] / std::sqrt(variance[h] + eps);
            for (int c = 0; c < C; ++c) into[c * H + h] = W[h * C + c] * scale;
            offset[h] = beta[h] - mean[h] * scale;
        }
    }
    // Rows of into, then offset, at channel h.
    Wide at(int row, int64_t h) const {
        return read<Wide>(row < C ? &into[row * H + h] : &offset[h]);
    }
};

// Products of a row of each of a convolution's weights with into and offset.
template <typename T>
inline void row_products(const T* rel, const T* root, const Folded<T>& map, double* of_rel,
                         double* of_root) {
    Wide rel_sums[C + 1] = {}, root_sums[C + 1] = {};
    for (int64_t h = 0; h < map.H; h += WIDE) {
        const Wide r = widened(rel + h), s = widened(root + h);
        for (int i = 0; i <= C; ++i) {
            const Wide own = map.at(i, h);
            rel_sums[i] += r * own;
            root_sums[i] += s * own;
        }
    }
    for (int i = 0; i <= C; ++i) {
        of_rel[i] = total_of(rel_sums[i]);
        of_root[i] = total_of(root_sums[i]);
    }
}

template <typename T>
void fold(const T* x, const T* W, const T* b, const T* gamma, const T* beta, double eps,
          const T* rel, const T* rel_bias, const T* root, T* first, T* bias, double* counted,
          double* moments, int64_t R, int64_t H, int threads) {
    measure(x, moments, R, threads);
    const Folded<T> map(W, gamma, beta, eps, moments, H);
    for (int64_t h = 0; h < H; ++h) {
        counted[h] = static_cast<double>(R);
        counted[H + h] = map.mean[h] + b[h];
        counted[2 * H + h] = map.variance[h] < 0 ? 0 : map.variance[h] * R;
    }
    if (!rel) {
        std::copy(map.into.begin(), map.into.end(), first);
        std::copy(map.offset.begin(), map.offset.end(), bias);
        return;
    }
    for (int64_t o = 0; o < H; ++o) {
        double of_rel[C + 1], of_root[C + 1];
        row_products(rel + o * H, root + o * H, map, of_rel, of_root);
        for (int c = 0; c < C; ++c) {
            first[c * H + o] = static_cast<T>(of_rel[c]);
            first[(C + c) * H + o] = static_cast<T>(of_root[c]);
        }
        first[2 * C * H + o] = static_cast<T>(of_rel[C]);
        bias[o] = static_cast<T>(of_root[C] + rel_bias[o]);
    }
}

// Part of a row of left^T right, where left has C + 1 rows, and right is at the part's columns.
template <typename T>
inline void product_row(const double* left, const Wide* right, T* to) {
    Wide sum = {};
    for (int i = 0; i <= C; ++i) sum += left[i] * right[i];
    narrowed(to, sum);
}

// Gradients of into and offset, (4, H), and of rel and root: as they are, or as factors (3, 4, H) of
// d_rel = factors[0]^T factors[2] and d_root = factors[1]^T factors[2].
template <typename T>
void convolution_backward(const T* d_first, const T* d_bias, const Folded<T>& map, const T* rel,
                          const T* root, T* d_rel, T* d_root, double* factors, double* d_map) {
    const int64_t H = map.H, part = (C + 1) * H;
    for (int64_t o = 0; o < H; ++o) {
        double of_rel[C + 1], of_root[C + 1];
        for (int c = 0; c < C; ++c) {
            of_rel[c] = d_first[c * H + o];
            of_root[c] = d_first[(C + c) * H + o];
        }
        of_rel[C] = d_first[2 * C * H + o];
        of_root[C] = d_bias[o];
        for (int i = 0; factors && i <= C; ++i) {
            factors[i * H + o] = of_rel[i];
            factors[part + i * H + o] = of_root[i];
            factors[2 * part + i * H + o] = i < C ? map.into[i * H + o] : map.offset[o];
        }
        for (int64_t h = 0; h < H; h += WIDE) {
            const Wide r = widened(rel + o * H + h), s = widened(root + o * H + h);
            Wide own[C + 1];
            for (int i = 0; i <= C; ++i) {
                own[i] = map.at(i, h);
                Wide sum = read<Wide>(d_map + i * H + h) + of_rel[i] * r + of_root[i] * s;
                std::memcpy(d_map + i * H + h, &sum, sizeof sum);
            }
            if (factors) continue;
            product_row(of_rel, own, d_rel + o * H + h);
            product_row(of_root, own, d_root + o * H + h);
        }
    }
}

// Pairs (C + 1, rows) and (C + 1, columns), and sums (rows, columns) of their products.
struct Products {
    const double *lefts, *rights;
    double* total;
    int64_t num, rows, columns;
    bool is_first;

    // Adds the numbers of row o in NUM vectors of columns from h on, each rounded to float before.
    template <int NUM>
    void add(int64_t o, int64_t h) const {
        double* to = total + o * columns + h;
        Wide sums[NUM] = {};
        for (int v = 0; v < NUM && !is_first; ++v) sums[v] = read<Wide>(to + v * WIDE);
        for (int64_t part = 0; part < num * (C + 1); part += C + 1) {
            Wide products[NUM] = {};
            for (int i = 0; i <= C; ++i) {
                const double left = lefts[(part + i) * rows + o];
                const double* right = rights + (part + i) * columns + h;
                for (int v = 0; v < NUM; ++v) products[v] += left * read<Wide>(right + v * WIDE);
            }
            for (int v = 0; v < NUM; ++v)
                sums[v] += __builtin_convertvector(__builtin_convertvector(products[v], Narrow), Wide);
        }
        std::memcpy(to, sums, sizeof sums);
    }
};

void add_products(const Products& products, int threads) {
    constexpr int NUM = 16 / WIDE;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t o = 0; o < products.rows; ++o) {
        int64_t h = 0;
        for (; h + NUM * WIDE <= products.columns; h += NUM * WIDE) products.add<NUM>(o, h);
        for (; h < products.columns; h += WIDE) products.add<1>(o, h);
    }
}

// d_first and d_bias are gradients of the map, d_features those of the features. d_b is 0, because
// the norm subtracts the mean; so nobody needs it.
template <typename T>
void fold_backward(const T* d_first, const T* d_bias, const T* d_features, const T* x, const T* W,
                   const T* gamma, const T* beta, double eps, const T* rel, const T* root,
                   const double* moments, T* dx, T* d_total, T* dW, T* d_gamma, T* d_beta, T* d_rel,
                   T* d_root, double* factors, int64_t R, int64_t H, int threads) {
    const Folded<T> map(W, gamma, beta, eps, moments, H);
    std::vector<double> d_map((C + 1) * H, 0.0);  // gradients of into, then of offset
    if (rel) {
        convolution_backward(d_first, d_bias, map, rel, root, d_rel, d_root, factors,
                             d_map.data());
    } else {
        std::copy(d_first, d_first + C * H, d_map.begin());
        std::copy(d_bias, d_bias + H, d_map.begin() + C * H);
    }
    double d_mean[C] = {}, d_covariance[C][C] = {};
    for (int64_t h = 0; h < H; ++h) {
        const T* w = W + h * C;
        const double rate = 1 / std::sqrt(map.variance[h] + eps), scale = gamma[h] * rate;
        const double d_offset = d_map[C * H + h];
        double d_scale = -d_offset * map.mean[h];
        for (int c = 0; c < C; ++c) d_scale += d_map[c * H + h] * w[c];
        const double d_variance = -0.5 * d_scale * scale * rate * rate;
        for (int c = 0; c < C; ++c) {
            double product = 0;
            for (int k = 0; k < C; ++k) {
                product += moments[C + c * C + k] * w[k];
                d_covariance[c][k] += d_variance * w[c] * w[k];
            }
            dW[h * C + c] = static_cast<T>(d_map[c * H + h] * scale - d_offset * scale * moments[c] +
                                           2 * d_variance * product);
            d_mean[c] -= d_offset * scale * w[c];
        }
        d_gamma[h] = static_cast<T>(d_scale * rate);
        d_beta[h] = static_cast<T>(d_offset);
    }
    const int width = rel ? F : C;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < R; ++r) {
        const T* from = d_features + r * width;
        for (int c = 0; c < C; ++c) {
            double sum = d_mean[c];
            for (int k = 0; k < C; ++k) sum += 2 * d_covariance[c][k] * (x[r * C + k] - moments[k]);
            dx[r * C + c] = from[width == F ? C + c : c] + static_cast<T>(sum / R);
            if (width == F) d_total[r * C + c] = from[c];
        }
    }
}

// The features of a graph convolution on a grid of pixels, each connected to the 8 around it.
template <typename T>
void features(const T* total, const T* x, T* to, int64_t images, int64_t height, int64_t width,
              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t line = 0; line < images * height; ++line) {
        const int64_t i = line % height, lines = 1 + (i > 0) + (i + 1 < height);
        for (int64_t j = 0; j < width; ++j) {
            const int64_t r = line * width + j, columns = 1 + (j > 0) + (j + 1 < width);
            std::copy(total + r * C, total + (r + 1) * C, to + r * F);
            std::copy(x + r * C, x + (r + 1) * C, to + r * F + C);
            to[r * F + 2 * C] = static_cast<T>(lines * columns - 1);
        }
    }
}

}  // namespace

#define FOLD(T, NAME)                                                                              \
    extern "C" void vigpipe_fold_##NAME(                                                           \
        const T* x, const T* W, const T* b, const T* gamma, const T* beta, double eps,             \
        const T* rel, const T* rel_bias, const T* root, T* first, T* bias, double* counted,        \
        double* moments, int64_t R, int64_t H, int threads) {                                      \
        fold(x, W, b, gamma, beta, eps, rel, rel_bias, root, first, bias, counted, moments, R, H,  \
             threads);                                                                             \
    }                                                                                              \
    extern "C" void vigpipe_fold_backward_##NAME(                                                  \
        const T* d_first, const T* d_bias, const T* d_features, const T* x, const T* W,            \
        const T* gamma, const T* beta, double eps, const T* rel, const T* root,                    \
        const double* moments, T* dx, T* d_total, T* dW, T* d_gamma, T* d_beta, T* d_rel,          \
        T* d_root, double* factors, int64_t R, int64_t H, int threads) {                           \
        fold_backward(d_first, d_bias, d_features, x, W, gamma, beta, eps, rel, root, moments, dx, \
                      d_total, dW, d_gamma, d_beta, d_rel, d_root, factors, R, H, threads);        \
    }                                                                                              \
    extern "C" void vigpipe_features_##NAME(const T* total, const T* x, T* to, int64_t images,     \
                                            int64_t height, int64_t width, int threads) {          \
        features(total, x, to, images, height, width, threads);                                    \
    }

FOLD(float, float32)
FOLD(double, float64)

extern "C" void vigpipe_add_products(const double* lefts, const double* rights, double* total,
                                     int64_t num, int64_t rows, int64_t columns, int is_first,
                                     int threads) {
    add_products({lefts, rights, total, num, rows, columns, is_first != 0}, threads);
}
