// Which channels of wide rows are kept: four lanes of 16 bits from every hash, lowest bits first.
//
//     rows (R) hashed keys   kept (R, C) bytes, 1 where a lane is at least the threshold
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

}  // namespace

extern "C" void vigpipe_lanes_at_least(const int64_t* rows, uint8_t* kept, int64_t first,
                                       int64_t threshold, int64_t R, int64_t C, int threads) {
    const int16_t least = static_cast<int16_t>(threshold);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < R; ++r) {
        const uint64_t row = static_cast<uint64_t>(rows[r]);
        for (int64_t c = 0; c < C; c += 4 * GROUPS) {
            uint64_t bits[GROUPS];
            int16_t lanes[4 * GROUPS];
            const int64_t num = std::min(4 * GROUPS, C - c), groups = (num + 3) / 4;
            for (int64_t g = 0; g < groups; ++g)
                bits[g] = mixed(row ^ (static_cast<uint64_t>(first + c / 4 + g) * GOLDEN));
            std::memcpy(lanes, bits, 8 * groups);
            for (int64_t i = 0; i < num; ++i) kept[r * C + c + i] = lanes[i] >= least;
        }
    }
}
