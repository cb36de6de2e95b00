// Axial max-relative aggregation, forward and backward: `vigpipe.ops.axial` has its definition.
//
//     x, out, grad, dx (B, H, W, C)
//     links (L, 3) int64: axis, shift, and the link's number among the G gated ones, from 1, or 0
//     distances (B, G, H * W): L1 distances of nodes to those that they are linked to by gated links
//     limit (B): of a hard gate; temperature: of a soft gate; null for none
//
// Features are of type S, and everything is computed in T = Number<S>. A node's row and those that
// it is linked to stay in the cache while their distances, and then the maximum, are computed.
#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.h"

namespace {

constexpr int64_t BAND = 64;  // channels whose gradients are computed together
constexpr double LEAST_TEMPERATURE = 1e-6;

struct Link {
    int64_t axis, shift, gate;
};

struct Links {
    const Link* first;
    int64_t num, gated;  // how many, and how many of them are gated
    const Link& operator[](int64_t i) const { return first[i]; }
};

struct Grid {
    int64_t height, width, C;
    int64_t nodes() const { return height * width; }
};

inline int64_t before(int64_t i, int64_t shift, int64_t side) {
    const int64_t j = i - shift;
    return j < 0 ? j + side : j >= side ? j - side : j;
}

inline int64_t linked(const Link& link, int64_t node, const Grid& grid) {
    const int64_t row = node / grid.width, column = node % grid.width;
    return link.axis == 0 ? before(row, link.shift, grid.height) * grid.width + column
                          : row * grid.width + before(column, link.shift, grid.width);
}

template <typename T>
struct Gate {
    const T *limit, *temperature;  // limits of the images; both are null without a gate
    T scale() const { return std::abs(*temperature) + T(LEAST_TEMPERATURE); }
    T operator()(T distance, int64_t image) const {
        if (temperature) return std::exp(-distance / scale());
        return distance < limit[image] ? T(1) : T(0);
    }
};

template <typename V>
INLINED V magnitude(V v) {
    return v < 0 ? -v : v;
}

// The L1 distance of two rows. Four sums, as each addition waits for the one before.
template <typename S>
inline Number<S> distance(const S* x, const S* y, int64_t C) {
    using T = Number<S>;
    Vector<T> sums[4] = {};
    int64_t c = 0;
    for (; c + 4 * WIDTH<S> <= C; c += 4 * WIDTH<S>)
        for (int i = 0; i < 4; ++i)
            sums[i] += magnitude(load(y + c + i * WIDTH<S>) - load(x + c + i * WIDTH<S>));
    for (; c < C; c += WIDTH<S>) sums[0] += magnitude(load(y + c, C - c) - load(x + c, C - c));
    return sum<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// A link that can give a node something: which node it leads to, and its factor, with the sign.
// After it come `zeros` links that give 0.
template <typename T>
struct Active {
    int64_t node, link;
    T factor;
    int zeros;
};

// Fills in the links of a node that are open, and returns how many. With `measures`, the distances
// are computed and stored, otherwise they are read.
template <bool measures, typename S>
inline int open_links(const S* x, int64_t node, int64_t image, Links links, Grid grid,
                      Gate<Number<S>> gate, int sign, Number<S>* distances,
                      Active<Number<S>>* open) {
    using T = Number<S>;
    int num = 0;
    for (int64_t l = 0; l < links.num; ++l) {
        const int64_t other = linked(links[l], node, grid);
        T factor = T(sign);
        if (links[l].gate) {
            T& stored = distances[(links[l].gate - 1) * grid.nodes() + node];
            if (measures) stored = distance(x + node * grid.C, x + other * grid.C, grid.C);
            const T gated = gate(stored, image);
            // What is not finite is not hidden by a closed gate.
            if (gated == 0 && stored - stored == 0) {
                if (num) ++open[num - 1].zeros;
                continue;
            }
            factor *= gated;
        }
        open[num++] = {other, l, factor, 0};
    }
    return num;
}

// The larger one; the first NaN stays.
template <typename V>
INLINED V larger(V top, V value) {
    return (~(value <= top) & (top == top)) ? value : top;
}

template <int VECTORS, typename S>
inline void take_maxima(const S* x, const S* row, const Active<Number<S>>* open, int num, int64_t c,
                        int64_t left, int64_t C, S* out) {
    using T = Number<S>;
    const auto part = [left](const S* from, int v) {
        return VECTORS > 1 ? load(from + v * WIDTH<S>) : load(from, left);
    };
    Vector<T> top[VECTORS] = {}, self[VECTORS];
    for (int v = 0; v < VECTORS; ++v) self[v] = part(row + c, v);
    for (int i = 0; i < num; ++i) {
        const S* from = x + open[i].node * C + c;
        for (int v = 0; v < VECTORS; ++v)
            top[v] = larger(top[v], (part(from, v) - self[v]) * open[i].factor);
    }
    for (int v = 0; v < VECTORS; ++v)
        store<S>(out + c + v * WIDTH<S>, top[v], VECTORS > 1 ? WIDTH<S> : left);
}

template <typename S>
void axial(const S* x, Links links, Gate<Number<S>> gate, S* out, Number<S>* distances, int64_t B,
           Grid grid, int sign, int threads) {
    using T = Number<S>;
    const int64_t N = grid.nodes(), C = grid.C;
#pragma omp parallel num_threads(threads)
    {
        const NoDenormals flush;
        std::vector<Active<T>> open(links.num);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < B * N; ++i) {
            const int64_t image = i / N, node = i % N;
            const S* features = x + image * N * C;
            const S* row = features + node * C;
            const int num = open_links<true>(features, node, image, links, grid, gate, sign,
                                             distances + image * links.gated * N, open.data());
            constexpr int VECTORS = 4;
            int64_t c = 0;
            for (; c + VECTORS * WIDTH<S> <= C; c += VECTORS * WIDTH<S>)
                take_maxima<VECTORS>(features, row, open.data(), num, c, WIDTH<S>, C, out + i * C);
            for (; c < C; c += WIDTH<S>)
                take_maxima<1>(features, row, open.data(), num, c, C - c, C, out + i * C);
        }
    }
}

template <typename T>
INLINED void add(T* to, Vector<T> v, int64_t num) {
    store<T>(to, load(to, num) + v, num);
}

// One vector of channels of one node: hands the gradient of the maximum to the links, last to first.
// What a link gets of equal numbers is half, and the rest goes to what came before. To `slopes` is
// added gradient times relative feature, of each link.
template <typename S>
inline void backward_vector(const S* grad, const S* x, const S* row,
                            const std::vector<Active<Number<S>>>& open, int num, int64_t C,
                            int64_t left, Number<S>* dx, Number<S>* d_row,
                            Vector<Number<S>>* tops, Vector<Number<S>>* slopes) {
    using T = Number<S>;
    using V = Vector<T>;
    const V self = load(row, left);
    V top = {};
    for (int i = 0; i < num; ++i) {
        tops[i] = top;
        top = larger(top, (load(x + open[i].node * C, left) - self) * open[i].factor);
    }
    V rest = load(grad, left), of_self = {};
    for (int i = num - 1; i >= 0; --i) {
        if (open[i].zeros) rest = top == 0 ? rest * std::ldexp(T(1), -open[i].zeros) : rest;
        const V relative = load(x + open[i].node * C, left) - self;
        const V value = relative * open[i].factor;
        const V taken = value > tops[i] ? rest : value == tops[i] ? rest * T(0.5) : V{};
        rest -= taken;
        top = tops[i];
        const V given = taken * open[i].factor;
        add(dx + open[i].node * C, given, left);
        of_self -= given;
        if (slopes) slopes[i] += taken * relative;
    }
    add(d_row, of_self, left);
}

// A thread's memory for the links of a node.
template <typename T>
struct Memory {
    std::vector<Active<T>> open;
    Buffer<Vector<T>> tops, sums;
    explicit Memory(int64_t L) : open(L), tops(L), sums(L) {}
};

// Adds the gradients of an image's maxima to dx, for the `width` channels from x on, and stores
// those of its gates, as far as they come from these channels, in `slopes` (G, H * W), if any.
template <typename S>
void backward_band(const S* grad, const S* x, int64_t image, Links links, Grid grid,
                   Gate<Number<S>> gate, int sign, Number<S>* distances, Number<S>* dx,
                   int64_t width, Number<S>* slopes, Memory<Number<S>>& memory) {
    using V = Vector<Number<S>>;
    const int64_t N = grid.nodes(), C = grid.C;
    if (slopes) std::fill_n(slopes, links.gated * N, Number<S>(0));
    for (int64_t node = 0; node < N; ++node) {
        const int num = open_links<false>(x, node, image, links, grid, gate, sign, distances,
                                          memory.open.data());
        if (slopes) std::fill_n(memory.sums.begin(), num, V{});
        for (int64_t c = 0; c < width; c += WIDTH<S>)
            backward_vector(grad + node * C + c, x + c, x + node * C + c, memory.open, num, C,
                            width - c, dx + c, dx + node * C + c, memory.tops.data(),
                            slopes ? memory.sums.data() : nullptr);
        for (int i = 0; slopes && i < num; ++i)
            if (const int64_t of_gate = links[memory.open[i].link].gate)
                slopes[(of_gate - 1) * N + node] = sign * sum<Number<S>>(memory.sums[i]);
    }
}

// Turns the gradients of an image's soft gates, from each band, into those of the distances, and
// returns that of the gates' scale.
template <typename T>
double of_distances(T* slopes, int64_t bands, const T* distances, int64_t num, Gate<T> gate) {
    const T scale = gate.scale();
    double of_scale = 0;
    for (int64_t i = 0; i < num; ++i) {
        T slope = slopes[i];
        for (int64_t band = 1; band < bands; ++band) slope += slopes[band * num + i];
        if (slope == 0) {
            slopes[i] = 0;
            continue;
        }
        slopes[i] = -slope * gate(distances[i], 0) / scale;
        of_scale -= double(slopes[i]) * distances[i] / scale;
    }
    return of_scale;
}

// Adds what distances with these gradients owe to the `width` channels from x on.
template <typename S>
void add_of_distances(const S* x, Links links, Grid grid, const Number<S>* slopes, Number<S>* dx,
                      int64_t width) {
    using V = Vector<Number<S>>;
    const int64_t N = grid.nodes(), C = grid.C;
    for (int64_t node = 0; node < N; ++node)
        for (int64_t l = 0; l < links.num; ++l) {
            if (!links[l].gate) continue;
            const Number<S> slope = slopes[(links[l].gate - 1) * N + node];
            if (slope == 0) continue;
            const int64_t other = linked(links[l], node, grid);
            for (int64_t c = 0; c < width; c += WIDTH<S>) {
                const int64_t left = width - c;
                const V relative = load(x + other * C + c, left) - load(x + node * C + c, left);
                const V given = relative > 0 ? all(slope) : relative < 0 ? all(-slope) : V{};
                add(dx + other * C + c, given, left);
                add(dx + node * C + c, -given, left);
            }
        }
}

// With a soft gate, `slopes` (B, bands, G, H * W) is memory, and the result its scale's gradient.
template <typename S>
double axial_backward(const S* grad, const S* x, Links links, Gate<Number<S>> gate,
                      Number<S>* distances, Number<S>* dx, Number<S>* slopes, int64_t B, Grid grid,
                      int sign, int threads) {
    using T = Number<S>;
    const int64_t N = grid.nodes(), C = grid.C, bands = (C + BAND - 1) / BAND;
    const int64_t num = links.gated * N;
    std::vector<double> of_scales(B);
#pragma omp parallel num_threads(threads)
    {
        const NoDenormals flush;
        Memory<T> memory(links.num);
#pragma omp for schedule(static)
        for (int64_t job = 0; job < B * bands; ++job) {
            const int64_t image = job / bands, start = job % bands * BAND;
            const int64_t at = image * N * C + start, width = std::min(BAND, C - start);
            for (int64_t n = 0; n < N; ++n) std::fill_n(dx + at + n * C, width, T(0));
            backward_band(grad + at, x + at, image, links, grid, gate, sign,
                          distances + image * num, dx + at, width,
                          slopes ? slopes + job * num : nullptr, memory);
        }
        if (slopes) {
#pragma omp for schedule(static)
            for (int64_t image = 0; image < B; ++image)
                of_scales[image] = of_distances(slopes + image * bands * num, bands,
                                                distances + image * num, num, gate);
#pragma omp for schedule(static)
            for (int64_t job = 0; job < B * bands; ++job) {
                const int64_t image = job / bands, start = job % bands * BAND;
                const int64_t at = image * N * C + start, width = std::min(BAND, C - start);
                add_of_distances(x + at, links, grid, slopes + image * bands * num, dx + at, width);
            }
        }
    }
    double total = 0;
    for (const double of_scale : of_scales) total += of_scale;
    return total;
}

// The L1 distances of all nodes to those half a grid away in both directions, (B, H * W).
template <typename S>
void axial_far(const S* x, Number<S>* distances, int64_t B, Grid grid, int threads) {
    const int64_t N = grid.nodes(), C = grid.C;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < B * N; ++i) {
        const int64_t node = i % N;
        const int64_t row = before(node / grid.width, (grid.height + 1) / 2, grid.height);
        const int64_t column = before(node % grid.width, (grid.width + 1) / 2, grid.width);
        const S* features = x + (i - node) * C;
        distances[i] = distance(x + i * C, features + (row * grid.width + column) * C, C);
    }
}

}  // namespace

#define AXIAL(S, NAME)                                                                             \
    extern "C" void vigpipe_axial_##NAME(const S* x, const Link* links, const Number<S>* limit,    \
                                         const Number<S>* temperature, S* out,                     \
                                         Number<S>* distances, int64_t B, int64_t H, int64_t W,    \
                                         int64_t C, int64_t L, int64_t G, int sign, int threads) { \
        axial(x, {links, L, G}, {limit, temperature}, out, distances, B, {H, W, C}, sign, threads);\
    }                                                                                              \
    extern "C" void vigpipe_axial_backward_##NAME(                                                 \
        const S* grad, const S* x, const Link* links, const Number<S>* limit,                      \
        const Number<S>* temperature, Number<S>* distances, Number<S>* dx, Number<S>* slopes,      \
        double* d_scale, int64_t B, int64_t H, int64_t W, int64_t C, int64_t L, int64_t G,         \
        int sign, int threads) {                                                                   \
        *d_scale = axial_backward(grad, x, {links, L, G}, {limit, temperature}, distances, dx,     \
                                  slopes, B, {H, W, C}, sign, threads);                            \
    }                                                                                              \
    extern "C" void vigpipe_axial_far_##NAME(const S* x, Number<S>* distances, int64_t B,          \
                                             int64_t H, int64_t W, int64_t C, int threads) {       \
        axial_far(x, distances, B, {H, W, C}, threads);                                            \
    }

AXIAL(float, float32)
AXIAL(double, float64)
AXIAL(BFloat16, bfloat16)
