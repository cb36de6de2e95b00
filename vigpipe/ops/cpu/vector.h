// Vectors of numbers as wide as the machine has them, and the Gaussian on them.
//
// GCC's and clang's vector extensions: `a * b + c` on a Vector compiles to one instruction where
// there is one, on every architecture.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

// A function that is only fast where its arrays of vectors are registers of its caller.
#define INLINED __attribute__((always_inline)) static inline

#if defined(__SSE__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

template <typename T>
struct Lanes;
template <>
struct Lanes<float> {
    typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t Whole __attribute__((vector_size(VECTOR_BYTES)));
    typedef int16_t Short __attribute__((vector_size(VECTOR_BYTES / 2)));
};
template <>
struct Lanes<double> {
    typedef double Vector __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t Whole __attribute__((vector_size(VECTOR_BYTES)));
    typedef int16_t Short __attribute__((vector_size(VECTOR_BYTES / 4)));
};

// The upper half of a float: read and written in 16 bits, computed with as a float.
struct BFloat16 {
    uint16_t bits;
};
template <>
struct Lanes<BFloat16> : Lanes<float> {
    typedef uint16_t Bits __attribute__((vector_size(VECTOR_BYTES / 2)));
};

template <typename T>
using Vector = typename Lanes<T>::Vector;
template <typename T>
using Whole = typename Lanes<T>::Whole;
template <typename T>
using Short = typename Lanes<T>::Short;  // as many numbers of 16 bits

// What numbers of a type are computed in.
template <typename T>
using Number = std::conditional_t<std::is_same_v<T, BFloat16>, float, T>;

template <typename T>
constexpr int WIDTH = VECTOR_BYTES / static_cast<int>(sizeof(Number<T>));

// Memory that begins with a cache line: a vector across two of them takes two loads.
template <typename T>
struct AtCacheLine {
    using value_type = T;
    static constexpr std::align_val_t LINE{64};
    AtCacheLine() = default;
    template <typename U>
    AtCacheLine(const AtCacheLine<U>&) {}
    T* allocate(std::size_t num) { return static_cast<T*>(::operator new(num * sizeof(T), LINE)); }
    void deallocate(T* memory, std::size_t) { ::operator delete(memory, LINE); }
    friend bool operator==(const AtCacheLine&, const AtCacheLine&) { return true; }
    friend bool operator!=(const AtCacheLine&, const AtCacheLine&) { return false; }
};

template <typename T>
using Buffer = std::vector<T, AtCacheLine<T>>;

// A vector of any kind, from wherever its bytes are.
template <typename V>
static inline V read(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <typename T>
static inline Vector<T> load(const T* from) {
    return read<Vector<T>>(from);
}

template <typename T>
static inline void store(T* to, Vector<T> v) {
    std::memcpy(to, &v, sizeof v);
}

// The first `num` numbers, zeros behind them.
template <typename T>
static inline Vector<T> load(const T* from, int64_t num) {
    if (num >= WIDTH<T>) return load(from);
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return (Vector<T>)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << num) - 1), from);
#endif
    Vector<T> v = {};
    std::memcpy(&v, from, num * sizeof(T));
    return v;
}

template <typename T>
static inline void store(T* to, Vector<T> v, int64_t num) {
    if (num >= WIDTH<T>) return store<T>(to, v);
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << num) - 1), (__m512)v);
#endif
    std::memcpy(to, &v, num * sizeof(T));
}

typedef uint32_t WideBits __attribute__((vector_size(VECTOR_BYTES)));

static inline Vector<float> widened(Lanes<BFloat16>::Bits bits) {
    return (Vector<float>)(__builtin_convertvector(bits, WideBits) << 16);
}

// Rounds to the nearest, of two to the even one; NaN stays NaN.
static inline Lanes<BFloat16>::Bits narrowed(Vector<float> v) {
#if defined(__AVX512BF16__)
    return (Lanes<BFloat16>::Bits)_mm512_cvtneps_pbh((__m512)v);  // what is denormal becomes 0
#else
    const WideBits bits = (WideBits)v;
    const WideBits rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return __builtin_convertvector((v == v ? rounded : bits | 0x400000) >> 16, Lanes<BFloat16>::Bits);
#endif
}

// One number.
static inline float number(float x) { return x; }
static inline double number(double x) { return x; }
static inline float number(BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    return read<float>(&bits);
}

template <>
inline Vector<float> load(const BFloat16* from) {
    return widened(read<Lanes<BFloat16>::Bits>(from));
}

template <>
inline Vector<float> load(const BFloat16* from, int64_t num) {
    if (num >= WIDTH<BFloat16>) return load(from);
    Lanes<BFloat16>::Bits bits = {};
    std::memcpy(&bits, from, num * sizeof(BFloat16));
    return widened(bits);
}

template <>
inline void store<BFloat16>(BFloat16* to, Vector<float> v) {
    const Lanes<BFloat16>::Bits bits = narrowed(v);
    std::memcpy(to, &bits, sizeof bits);
}

template <>
inline void store<BFloat16>(BFloat16* to, Vector<float> v, int64_t num) {
    const Lanes<BFloat16>::Bits bits = narrowed(v);
    std::memcpy(to, &bits, (num < WIDTH<BFloat16> ? num : WIDTH<BFloat16>) * sizeof(BFloat16));
}

template <typename T>
static inline Vector<T> all(T x) {
    return x - Vector<T>{};
}

template <typename T>
static inline T sum(Vector<T> v) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps((__m512)v);
#endif
    T total = 0;
    for (int i = 0; i < WIDTH<T>; ++i) total += v[i];
    return total;
}

// While one lives, its thread's results below 2^-126 are 0: an instruction that makes a denormal
// number takes 150 cycles.
struct NoDenormals {
#if defined(__SSE__)
    static constexpr unsigned FLUSH_TO_ZERO = 0x8000;
    const unsigned before = _mm_getcsr();
    NoDenormals() { _mm_setcsr(before | FLUSH_TO_ZERO); }
    ~NoDenormals() { _mm_setcsr(before); }
#else
    NoDenormals() {}
#endif
    NoDenormals(const NoDenormals&) = delete;
};

// The normal distribution: its cumulative Phi(z) and its density phi(z).
template <typename T>
struct Gaussian {
    Vector<T> cumulative, density;
};

static inline Vector<float> reciprocal(Vector<float> x) {
#if defined(__AVX512F__)
    Vector<float> guess = (Vector<float>)_mm512_rcp14_ps((__m512)x);
    return guess * (2.0f - x * guess);  // Newton: 14 bits become 24
#else
    return 1.0f / x;
#endif
}

// 2^y for -126 <= y <= 127: y is split into a whole number and a rest, of which 2^rest is a polynomial
// of degree 5 (relative error 8e-8).
static inline Vector<float> power_of_two(Vector<float> y) {
    using V = Vector<float>;
    V shifted = y + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are y, rounded
    V rest = y - (shifted - 12582912.0f);
    V p = rest * 0.00132764068f + 0.00967554043f;
    p = p * rest + 0.0555071344f;
    p = p * rest + 0.240221198f;
    p = p * rest + 0.693146967f;
    p = p * rest + 1.00000007f;
    return (V)((Whole<float>)p + ((Whole<float>)shifted << 23));
}

// exp(x) for x <= 0; below 2^-126 it is 0.
static inline Vector<float> exponential(Vector<float> x) {
    const Vector<float> y = x * 1.44269504f;
    const Vector<float> e = y < -126.0f ? Vector<float>{} : power_of_two(y);
    return x == x ? e : x;
}

// With a = |z|: Phi(-a) = exp(-a^2 / 2) G(a), and G, which falls from 1/2 like 0.4 / a, is a
// polynomial in 1 / (1 + 0.3 a): degree 8, fitted to the least largest relative error, 5.7e-8 up to
// a = 13.5. Both ends of Phi keep their relative precision.
INLINED Gaussian<float> gaussian(Vector<float> z) {
    using V = Vector<float>;
    V a = z < 0 ? -z : z;
    // Behind 12.8 both are next to 0, and denormal numbers would be slow. NaN comes back below.
    a = a < 12.8f ? a : all(12.8f);
    V t = reciprocal(1.0f + 0.3f * a);
    V g = t * 0.0383344066f - 0.168952607f;
    g = g * t + 0.228218579f;
    g = g * t - 0.076000966f;
    g = g * t + 0.142185945f;
    g = g * t + 0.0948326275f;
    g = g * t + 0.121882137f;
    g = g * t + 0.119493053f;
    g = g * t + 6.85347836e-06f;

    V e = power_of_two(a * a * -0.721347520f);  // -a^2 / 2 in powers of two, at least -119
    V tail = e * g;
    V cumulative = z < 0 ? tail : 1.0f - tail;
    cumulative = z == z ? cumulative : z;
    return {cumulative, e * 0.398942280f};
}

// For checks in double precision, where speed does not count.
static inline Gaussian<double> gaussian(Vector<double> z) {
    Gaussian<double> result;
    for (int i = 0; i < WIDTH<double>; ++i) {
        result.cumulative[i] = 0.5 * std::erfc(z[i] * -M_SQRT1_2);
        result.density[i] = 0.5 * M_2_SQRTPI * M_SQRT1_2 * std::exp(-0.5 * z[i] * z[i]);
    }
    return result;
}

// GELU of NUM vectors, z Phi(z), and its derivative, Phi(z) + z phi(z), unless `slope` is null.
//
// One vector alone waits most of the time, since each of 25 instructions needs the one before it.
// Several of them take every step together, and then the arithmetic limits the speed.
template <int NUM, typename V>
INLINED void gelu(const V* z, V* value, V* slope) {
    for (int i = 0; i < NUM; ++i) {
        const auto normal = gaussian(z[i]);
        if (slope) slope[i] = normal.cumulative + z[i] * normal.density;
        value[i] = z[i] * normal.cumulative;
    }
}

#if defined(__AVX512DQ__)
// As `gaussian`, in 28 instead of 37 instructions, some of which only AVX-512 has. phi(z) = 2^y /
// sqrt(2 pi), y = -a^2 / 2 in powers of two, is a polynomial of degree 5 in what rounding y leaves
// (relative error 9.1e-8), scaled. Phi(-a) is phi(z) times a polynomial of degree 8 in
// 1 / (1 + 0.29 a), which is fitted up to a = 12.8 (4.5e-8). NaN among z are missed by phi and Phi,
// but what is returned is multiplied by z.
template <int NUM>
INLINED void gelu(const Vector<float>* z, Vector<float>* value, Vector<float>* slope) {
    using V = Vector<float>;
    constexpr int LESS_FAR_FROM_ZERO = 0b1010;
    constexpr float TO_POWERS = -0.721347520f, MAGIC = 12582912.0f;  // as in power_of_two
    V a[NUM], whole[NUM], rest[NUM], density[NUM], t[NUM], tail[NUM];
#define EACH for (int i = 0; i < NUM; ++i)
    EACH a[i] = (V)_mm512_range_ps((__m512)z[i], (__m512)all(12.8f), LESS_FAR_FROM_ZERO);
    EACH {
        const V square = a[i] * a[i];
        whole[i] = (square * TO_POWERS + MAGIC) - MAGIC;
        rest[i] = square * TO_POWERS - whole[i];
    }
    EACH density[i] = rest[i] * 0.000530104619f + 0.00385867222f;
    EACH density[i] = density[i] * rest[i] + 0.0221438333f;
    EACH density[i] = density[i] * rest[i] + 0.0958347619f;
    EACH density[i] = density[i] * rest[i] + 0.276525676f;
    EACH density[i] = density[i] * rest[i] + 0.398942292f;
    EACH density[i] = (V)_mm512_scalef_ps((__m512)density[i], (__m512)whole[i]);
    EACH t[i] = reciprocal(1.0f + a[i] * 0.29f);
    EACH tail[i] = t[i] * 0.0986079127f - 0.484667748f;
    EACH tail[i] = tail[i] * t[i] + 0.772794664f;
    EACH tail[i] = tail[i] * t[i] - 0.388876408f;
    EACH tail[i] = tail[i] * t[i] + 0.475211918f;
    EACH tail[i] = tail[i] * t[i] + 0.186936185f;
    EACH tail[i] = tail[i] * t[i] + 0.304805011f;
    EACH tail[i] = tail[i] * t[i] + 0.288431048f;
    EACH tail[i] = tail[i] * t[i] + 7.14986818e-05f;
    EACH tail[i] *= density[i];
    EACH {
        const auto right = _mm512_cmp_ps_mask((__m512)z[i], _mm512_setzero_ps(), _CMP_GE_OQ);
        const V cumulative = (V)_mm512_mask_sub_ps((__m512)tail[i], right, (__m512)all(1.0f),
                                                   (__m512)tail[i]);
        if (slope) slope[i] = z[i] * density[i] + cumulative;
        value[i] = z[i] * cumulative;
    }
#undef EACH
}
#endif
