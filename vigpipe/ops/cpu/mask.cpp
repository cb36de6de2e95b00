// Dropout of channels of wide rows, decided by a hash, and ReLU that remembers a bit a number.
//
//     rows (R) hashed keys   kept (R, C) bytes, 1 where a lane of 16 bits is at least the threshold;
//     every hash has four, lowest bits first
#include <algorithm>
#include <cstring>

#include "vector.h"

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;
constexpr int64_t GROUPS = 64;  // hashes at a time: 256 channels

inline uint64_t mixed(uint64_t x) {  // the output function of SplitMix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Calls use(start, num, lanes) for groups of channels of a row.
template <typename Use>
inline void for_lanes(uint64_t row, int64_t first, int64_t C, Use use) {
    for (int64_t c = 0; c < C; c += 4 * GROUPS) {
        uint64_t bits[GROUPS];
        int16_t lanes[4 * GROUPS];
        const int64_t num = std::min(4 * GROUPS, C - c), groups = (num + 3) / 4;
        for (int64_t g = 0; g < groups; ++g)
            bits[g] = mixed(row ^ (static_cast<uint64_t>(first + c / 4 + g) * GOLDEN));
        std::memcpy(lanes, bits, 8 * groups);
        use(c, num, lanes);
    }
}

// What is dropped becomes 0, or NaN where it is not finite.
template <typename T>
void dropped(const int64_t* rows, const T* x, T* y, T scale, int64_t first, int64_t threshold,
             int64_t R, int64_t C, int threads) {
    const int16_t least = static_cast<int16_t>(threshold);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < R; ++r)
        for_lanes(static_cast<uint64_t>(rows[r]), first, C,
                  [&](int64_t c, int64_t num, const int16_t* lanes) {
                      const T* from = x + r * C + c;
                      T* to = y + r * C + c;
                      for (int64_t i = 0; i < num; i += WIDTH<T>) {
                          const Whole<T> lane =
                              __builtin_convertvector(read<Short<T>>(lanes + i), Whole<T>);
                          const Vector<T> factor = lane >= least ? all(scale) : Vector<T>{};
                          store<T>(to + i, load(from + i, num - i) * factor, num - i);
                      }
                  });
}

// y = max(x, 0), NaN stays; bit i % 8 of byte i / 8 says whether x[i] > 0, or is NaN.
template <typename T>
void relu(const T* x, T* y, uint8_t* bits, int64_t num, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t byte = 0; byte < (num + 7) / 8; ++byte) {
        unsigned passes = 0;
        const int64_t start = 8 * byte, end = std::min(start + 8, num);
        for (int64_t i = start; i < end; ++i) {
            const bool is_on = !(x[i] <= 0);
            y[i] = is_on ? x[i] : T(0);
            passes |= static_cast<unsigned>(is_on) << (i - start);
        }
        bits[byte] = static_cast<uint8_t>(passes);
    }
}

template <typename T>
void relu_backward(const T* grad, const uint8_t* bits, T* d_x, int64_t num, int threads) {
    constexpr int64_t BLOCK = 16;  // numbers whose bits are read together
    Whole<T> place;
    for (int i = 0; i < WIDTH<T>; ++i) place[i] = i;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < (num + BLOCK - 1) / BLOCK; ++block) {
        const int64_t start = block * BLOCK, end = std::min(start + BLOCK, num);
        const int passes = bits[2 * block] | (start + 8 < num ? bits[2 * block + 1] << 8 : 0);
        for (int64_t i = start; i < end; i += WIDTH<T>) {
            const Whole<T> is_on = (Whole<T>{} + (passes >> (i - start))) >> place & 1;
            store<T>(d_x + i, is_on != 0 ? load(grad + i, end - i) : Vector<T>{}, end - i);
        }
    }
}

}  // namespace

extern "C" void vigpipe_lanes_at_least(const int64_t* rows, uint8_t* kept, int64_t first,
                                       int64_t threshold, int64_t R, int64_t C, int threads) {
    const int16_t least = static_cast<int16_t>(threshold);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < R; ++r)
        for_lanes(static_cast<uint64_t>(rows[r]), first, C,
                  [&](int64_t c, int64_t num, const int16_t* lanes) {
                      for (int64_t i = 0; i < num; ++i) kept[r * C + c + i] = lanes[i] >= least;
                  });
}

#define MASKS(T, NAME)                                                                             \
    extern "C" void vigpipe_dropped_##NAME(const int64_t* rows, const T* x, T* y, double scale,    \
                                           int64_t first, int64_t threshold, int64_t R, int64_t C, \
                                           int threads) {                                          \
        dropped(rows, x, y, T(scale), first, threshold, R, C, threads);                            \
    }                                                                                              \
    extern "C" void vigpipe_relu_##NAME(const T* x, T* y, uint8_t* bits, int64_t num,              \
                                        int threads) {                                             \
        relu(x, y, bits, num, threads);                                                            \
    }                                                                                              \
    extern "C" void vigpipe_relu_backward_##NAME(const T* grad, const uint8_t* bits, T* d_x,       \
                                                 int64_t num, int threads) {                       \
        relu_backward(grad, bits, d_x, num, threads);                                              \
    }

MASKS(float, float32)
MASKS(double, float64)
