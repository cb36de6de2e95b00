// The kNN graph without a (B, N, M) tensor.
//
//     x (B, N, C) nodes   y (B, M, C) candidates   bias (1 or B, N, M)   graph (B, N, K) int64
//
// Features are of type S, and everything is computed in T = Number<S>.
//
// For a few nodes at a time, a matrix product whose result stays in cache computes the similarities
// to all candidates; then the best of every row are chosen. Of equal similarities, the one with the
// lower index comes first.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "vector.h"

namespace {

// The factor that scales a row to unit length; 0 if its length is not finite.
template <typename S>
Number<S> unit_scale(const S* row, int64_t C) {
    using T = Number<S>;
    Vector<T> squares = {};
    for (int64_t c = 0; c < C; c += WIDTH<T>) {
        const Vector<T> v = load(row + c, C - c);
        squares += v * v;
    }
    const T norm = std::sqrt(sum<T>(squares));
    return std::isfinite(norm) ? 1 / std::max(norm, T(1e-12)) : T(0);
}

// Stores the candidates at unit length in strips of COLUMNS vectors, channel by channel in a strip.
template <typename S>
class Candidates {
    using T = Number<S>;
    // A tile of the matrix product: ROWS x COLUMNS vectors of sums fill the registers.
#if defined(__AVX512F__)
    static constexpr int COLUMNS = 3;
#else
    static constexpr int COLUMNS = 2;
#endif
    static constexpr int64_t STRIP = COLUMNS * WIDTH<T>;
    const int64_t M, C, num_strips;
    Buffer<T> packed, squares, nodes;

   public:
#if defined(__AVX512F__)
    static constexpr int ROWS = 8;
#else
    static constexpr int ROWS = 6;
#endif
    const int64_t width;  // length of a row of similarities, the first M of which count

    Candidates(const S* y, int64_t M_, int64_t C_)
        : M(M_), C(C_), num_strips((M_ + STRIP - 1) / STRIP), packed(num_strips * STRIP * C_, T(0)),
          squares(num_strips * STRIP, std::numeric_limits<T>::infinity()), nodes(ROWS * C_),
          width(num_strips * STRIP) {
        for (int64_t j = 0; j < M; ++j) {
            const S* row = y + j * C;
            const T scale = unit_scale(row, C);
            if (scale == 0) continue;  // farther than all others
            T* to = &packed[j / STRIP * STRIP * C + j % STRIP];
            Vector<T> square = {};
            for (int64_t c = 0; c < C; c += WIDTH<T>) {
                const Vector<T> unit = load(row + c, C - c) * scale;
                square += unit * unit;
                for (int64_t i = 0; i < WIDTH<T> && c + i < C; ++i) to[(c + i) * STRIP] = unit[i];
            }
            squares[j] = sum<T>(square);
        }
    }

    // Computes 2 x y - |y|^2 for nodes, (num, C), at most ROWS, and all candidates, into (ROWS, width).
    void similarities(const S* x, int64_t num, T* to) {
        for (int64_t r = 0; r < num; ++r) {
            const S* row = x + r * C;
            const T scale = unit_scale(row, C);
            for (int64_t c = 0; c < C; ++c) nodes[r * C + c] = scale ? number(row[c]) * scale : T(0);
        }
        for (int64_t strip = 0; strip < num_strips; ++strip) {
            const int64_t left = M - strip * STRIP;  // the last strip may be narrower
            if (left > 2 * WIDTH<T>) {
                multiply<COLUMNS>(strip, to);
            } else if (left > WIDTH<T>) {
                multiply<2>(strip, to);
            } else {
                multiply<1>(strip, to);
            }
        }
    }

   private:
    template <int VECTORS>
    void multiply(int64_t strip, T* to) const {
        using V = Vector<T>;
        const T* from = &packed[strip * STRIP * C];
        V sums[ROWS][VECTORS] = {};
        for (int64_t c = 0; c < C; ++c) {
            V columns[VECTORS];
            for (int v = 0; v < VECTORS; ++v) columns[v] = load(from + c * STRIP + v * WIDTH<T>);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < VECTORS; ++v) sums[r][v] += nodes[r * C + c] * columns[v];
        }
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) {
                const int64_t at = strip * STRIP + v * WIDTH<T>;
                store<T>(to + r * width + at, T(2) * sums[r][v] - load(&squares[at]));
            }
    }
};

#if defined(HAS_TILES)
// As Candidates, for products in tiles. Features of unit length would have to be rounded to bfloat16
// once more, so candidates and nodes are multiplied as they are, and then divided by their lengths.
template <typename S>
class TiledCandidates {
    static_assert(std::is_same_v<S, BFloat16>);
    static constexpr int64_t SIDE = 16, STEP = 32;  // rows of a tile, and channels that it takes
    static constexpr int64_t TILE = SIDE * STEP;
    const WholeTiles tiles;
    const int64_t M, C, num_steps, num_strips;
    Buffer<S> packed, nodes;
    Buffer<float> scales, squares;

   public:
    static constexpr int64_t ROWS = 2 * SIDE, STRIP = 2 * SIDE;
    const int64_t width;  // length of a row of similarities, the first M of which count

    TiledCandidates(const S* y, int64_t M_, int64_t C_)
        : M(M_), C(C_), num_steps((C_ + STEP - 1) / STEP), num_strips((M_ + STRIP - 1) / STRIP),
          packed(num_strips * num_steps * 2 * TILE, S{0}), nodes(2 * num_steps * TILE, S{0}),
          scales(num_strips * STRIP, 0.0f),
          squares(num_strips * STRIP, std::numeric_limits<float>::infinity()),
          width(num_strips * STRIP) {
        for (int64_t j = 0; j < M; ++j) {
            const S* row = y + j * C;
            scales[j] = unit_scale(row, C);
            if (scales[j] == 0) continue;  // farther than all others
            Vector<float> square = {};
            for (int64_t c = 0; c < C; c += WIDTH<S>) {
                const Vector<float> unit = load(row + c, C - c) * scales[j];
                square += unit * unit;
            }
            squares[j] = sum<float>(square);
            // In a tile, a row has a pair of channels of each candidate.
            S* to = tile_of(j / SIDE) + j % SIDE * 2;
            for (int64_t c = 0; c + 1 < C; c += 2, to += 2 * SIDE)
                std::memcpy(to, row + c, 2 * sizeof(S));
            if (C % 2) *to = row[C - 1];
        }
    }

    // Computes 2 x y - |y|^2 for nodes, (num, C), at most ROWS, and all candidates, into (ROWS, width).
    void similarities(const S* x, int64_t num, float* to) {
        const int64_t padded = num_steps * STEP;
        float twice[ROWS];
        for (int64_t r = 0; r < num; ++r) {
            twice[r] = 2 * unit_scale(x + r * C, C);
            if (twice[r] != 0)
                std::memcpy(&nodes[r * padded], x + r * C, C * sizeof(S));
            else
                std::fill_n(&nodes[r * padded], C, S{0});
        }
        for (int64_t strip = 0; strip < num_strips; ++strip) multiply(strip, to + strip * STRIP);
        for (int64_t r = 0; r < num; ++r)
            for (int64_t j = 0; j < width; j += WIDTH<float>) {
                float* at = to + r * width + j;
                const Vector<float> scaled = load(at) * twice[r] * load(&scales[j]);
                store<float>(at, scaled - load(&squares[j]));
            }
    }

   private:
    // Two by two tiles of sums, from two of nodes and two of candidates.
    void multiply(int64_t strip, float* to) const {
        const int64_t node_bytes = num_steps * STEP * sizeof(S), bytes = width * sizeof(float);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = 0; step < num_steps; ++step) {
            _tile_loadd(4, &nodes[step * STEP], node_bytes);
            _tile_loadd(5, &nodes[(SIDE * num_steps + step) * STEP], node_bytes);
            _tile_loadd(6, &packed[((2 * strip) * num_steps + step) * TILE], 64);
            _tile_loadd(7, &packed[((2 * strip + 1) * num_steps + step) * TILE], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, to, bytes);
        _tile_stored(1, to + SIDE, bytes);
        _tile_stored(2, to + SIDE * width, bytes);
        _tile_stored(3, to + SIDE * width + SIDE, bytes);
    }

    S* tile_of(int64_t side) { return &packed[side * num_steps * TILE]; }
};
#endif

// Turns numbers into integers of the same order; -0 counts as 0.
static inline int32_t ordered(float x) {
    int32_t bits;
    x += 0.0f;
    std::memcpy(&bits, &x, sizeof x);
    return bits ^ ((bits >> 31) & INT32_MAX);
}
static inline int64_t ordered(double x) {
    int64_t bits;
    x += 0.0;
    std::memcpy(&bits, &x, sizeof x);
    return bits ^ ((bits >> 63) & INT64_MAX);
}

// Counts the keys, of `num`, that are at least a bound, without branches.
template <typename Key>
static inline Key count_from(const Key* keys, int64_t num, Key bound) {
    Key total = 0;
    for (int64_t j = 0; j < num; ++j) total += keys[j] >= bound;
    return total;
}

// Finds a bound that at least `num` keys reach, and not many more than `enough`, which is at least
// num. It bisects between low, which `reached` keys reach, and high, at most the largest key.
template <typename Key>
static Key bound_for(const Key* keys, int64_t size, int64_t num, int64_t enough, Key low, Key high,
                     int64_t reached) {
    while (reached > enough && low < high) {
        const Key middle = (low >> 1) + (high >> 1) + ((low | high) & 1);  // above low
        const int64_t reach = count_from(keys, size, middle);
        if (reach >= num) {
            low = middle;
            reached = reach;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Finds the largest numbers of a row, largest first; of equal ones, the lower index comes first.
//
// The row is distributed over LANES. The num-th largest of the lanes' maxima is a bound that at
// least num numbers reach, and in a long row not many more. The rank of each of those is then the
// count of greater numbers and of equal numbers before it. No branch depends on a single number.
template <typename T>
class Selection {
    using Key = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
    static constexpr int64_t FEW = 128;  // so many numbers are sorted by counting
    static constexpr int64_t BLOCK = 16, LANES = 64;
    const int64_t M, num, dilation;
    Buffer<Key> keys, found, indices;

   public:
    // Returns every dilation-th of the num largest.
    Selection(int64_t M_, int64_t num_, int64_t dilation_)
        : M(M_), num(num_), dilation(dilation_), keys(M_), found(M_ + BLOCK), indices(M_ + BLOCK) {}

    void operator()(const T* values, int64_t* graph) {
        const int64_t size = collect(values);
        if (size > FEW) return sort(size, graph);
        Key before[FEW], sorted[FEW];
        for (int64_t first = 0; first < size; first += BLOCK) count_before(first, size, before);
        for (int64_t i = 0; i < size; ++i) sorted[before[i]] = indices[i];
        for (int64_t place = 0; place < num; place += dilation) *graph++ = sorted[place];
    }

   private:
    // Counts, for each of BLOCK found keys, those before it: greater, or equal and earlier.
    void count_before(int64_t first, int64_t size, Key* before) const {
        constexpr int VECTORS = BLOCK / WIDTH<T>;
        const Key* key = found.data();
        Whole<T> own[VECTORS], place[VECTORS], total[VECTORS] = {};
        for (int v = 0; v < VECTORS; ++v) {
            own[v] = read<Whole<T>>(key + first + v * WIDTH<T>);
            for (int i = 0; i < WIDTH<T>; ++i) place[v][i] = first + v * WIDTH<T> + i;
        }
        const int64_t end = std::min(first + BLOCK, size);
        for (Key j = 0; j < first; ++j)
            for (int v = 0; v < VECTORS; ++v) total[v] -= key[j] >= own[v];
        for (Key j = first; j < end; ++j)
            for (int v = 0; v < VECTORS; ++v)
                total[v] -= (key[j] > own[v]) | ((key[j] == own[v]) & (j < place[v]));
        for (Key j = end; j < size; ++j)
            for (int v = 0; v < VECTORS; ++v) total[v] -= key[j] > own[v];
        std::memcpy(before + first, total, sizeof total);
    }

    // Fills found and indices with the num largest and a few more.
    int64_t collect(const T* values) {
        Key* key = keys.data();
        for (int64_t j = 0; j < M; ++j) key[j] = ordered(values[j]);
        Key lanes[LANES];
        std::fill(lanes, lanes + LANES, std::numeric_limits<Key>::min());
        const int64_t even = M / LANES * LANES;
        for (int64_t lane = 0; lane < LANES; lane += WIDTH<T>) {
            Whole<T> most = read<Whole<T>>(lanes + lane);
            for (int64_t j = lane; j < even; j += LANES) {
                const Whole<T> other = read<Whole<T>>(key + j);
                most = other > most ? other : most;
            }
            std::memcpy(lanes + lane, &most, sizeof most);
        }
        for (int64_t j = even; j < M; ++j) lanes[j - even] = std::max(lanes[j - even], key[j]);
        Key low = lanes[0], high = lanes[0];
        for (const Key lane : lanes) {
            low = std::min(low, lane);
            high = std::max(high, lane);
        }
        int64_t reached = M;
        if (num <= LANES) {
            low = bound_for(lanes, LANES, num, num, low, high, LANES);
            reached = count_from(key, M, low);
        } else {
            low = *std::min_element(key, key + M);
        }
        low = bound_for(key, M, num, num + num / 8 + 4, low, high, reached);
        return keep_from(low);
    }

    // Moves the keys that reach a bound to `found`, in their order, and counts them.
    int64_t keep_from(Key low) {
        const Key* key = keys.data();
        int64_t size = 0, j = 0;
#if defined(__AVX512F__)
        if constexpr (sizeof(Key) == 4) {
            const __m512i bound = _mm512_set1_epi32(low);
            __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            for (; j + 16 <= M; j += 16, index = _mm512_add_epi32(index, _mm512_set1_epi32(16))) {
                const __m512i some = _mm512_loadu_si512(key + j);
                const __mmask16 kept = _mm512_cmpge_epi32_mask(some, bound);
                _mm512_storeu_si512(&found[size], _mm512_maskz_compress_epi32(kept, some));
                _mm512_storeu_si512(&indices[size], _mm512_maskz_compress_epi32(kept, index));
                size += __builtin_popcount(kept);
            }
        }
#endif
        for (; j < M; ++j) {
            found[size] = key[j];
            indices[size] = static_cast<Key>(j);
            size += key[j] >= low;
        }
        return size;
    }

    void sort(int64_t size, int64_t* graph) {
        std::vector<int64_t> order(size);
        for (int64_t i = 0; i < size; ++i) order[i] = i;
        std::partial_sort(order.begin(), order.begin() + num, order.end(),
                          [this](int64_t i, int64_t j) {
                              return found[i] > found[j] || (found[i] == found[j] && i < j);
                          });
        for (int64_t place = 0; place < num; place += dilation) *graph++ = indices[order[place]];
    }
};

template <typename S, template <typename> class Similar>
void knn(const S* x, const S* y, const Number<S>* bias, int64_t* graph, int64_t B, int64_t N,
         int64_t M, int64_t C, int64_t bias_stride, int64_t k, int64_t dilation, int loop,
         int threads) {
    using T = Number<S>;
    constexpr int64_t ROWS = Similar<S>::ROWS;
    const int64_t wanted = (k - 1) * dilation + 1, num_tiles = (N + ROWS - 1) / ROWS;
    // Threads take whole images; if there are fewer images than threads, several threads share one,
    // and each packs its candidates.
    const int64_t shares = std::min<int64_t>((threads + B - 1) / B, num_tiles);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t job = 0; job < B * shares; ++job) {
        const int64_t b = job / shares, share = job % shares;
        Similar<S> similar((y ? y : x) + b * M * C, M, C);
        Buffer<T> tile(ROWS * similar.width);
        Selection<T> select(M, wanted, dilation);
        for (int64_t t = num_tiles * share / shares; t < num_tiles * (share + 1) / shares; ++t) {
            const int64_t first = t * ROWS, num = std::min(ROWS, N - first);
            similar.similarities(x + (b * N + first) * C, num, tile.data());
            for (int64_t n = first; n < first + num; ++n) {
                T* values = tile.data() + (n - first) * similar.width;
                if (bias)
                    for (int64_t j = 0; j < M; ++j)
                        values[j] -= bias[b * bias_stride + n * M + j];
                if (!loop && n < M) values[n] = -std::numeric_limits<T>::infinity();
                select(values, graph + (b * N + n) * k);
            }
        }
    }
}

template <typename S, typename... Arguments>
void knn_of(Arguments... arguments) {
#if defined(HAS_TILES)
    if constexpr (std::is_same_v<S, BFloat16>)
        if (may_use_tiles()) return knn<S, TiledCandidates>(arguments...);
#endif
    knn<S, Candidates>(arguments...);
}

}  // namespace

#define KNN(S, NAME)                                                                               \
    extern "C" void vigpipe_knn_##NAME(const S* x, const S* y, const Number<S>* bias,              \
                                       int64_t* graph, int64_t B, int64_t N, int64_t M, int64_t C, \
                                       int64_t bias_stride, int64_t k, int64_t dilation, int loop, \
                                       int threads) {                                              \
        knn_of<S>(x, y, bias, graph, B, N, M, C, bias_stride, k, dilation, loop, threads);         \
    }

KNN(float, float32)
KNN(double, float64)
KNN(BFloat16, bfloat16)

// Whether features in bfloat16 are multiplied in tiles here.
extern "C" int vigpipe_knn_in_tiles() {
#if defined(HAS_TILES)
    return may_use_tiles();
#else
    return 0;
#endif
}
