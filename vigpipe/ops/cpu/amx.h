// The tiles of Intel's AMX: eight registers of 16 rows of 64 bytes, and products of bfloat16 in them
// that are added up in float32.
#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

// Asks Linux to let this process use tiles, whose memory it keeps for nobody who does not ask.
static inline bool may_use_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    static const bool may = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
    return may;
}

// While one lives, all tiles of its thread have 16 rows of 64 bytes.
class WholeTiles {
    struct alignas(64) Shape {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };

   public:
    WholeTiles() {
        Shape shape;
        for (int i = 0; i < 8; ++i) {
            shape.row_bytes[i] = 64;
            shape.rows[i] = 16;
        }
        _tile_loadconfig(&shape);
    }
    ~WholeTiles() { _tile_release(); }
    WholeTiles(const WholeTiles&) = delete;
};
#endif
