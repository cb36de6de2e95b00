// Sums over the up to 8 neighbours of every node of a grid of pixels.
#include <cstdint>
#include <vector>

namespace {

// x and to (images, height, width, C). The sum over a window of 3 x 3 is separable: three rows are
// added, then three columns of the sums; the node itself is subtracted. Outside the grid is 0.
template <typename T>
void grid_sum(const T* x, T* to, int64_t images, int64_t height, int64_t width, int64_t C,
              int threads) {
    const int64_t size = width * C;
#pragma omp parallel num_threads(threads)
    {
        std::vector<T> sums(size + 2 * C, T(0)), zeros(size, T(0));
        T* of_rows = sums.data() + C;
#pragma omp for schedule(static)
        for (int64_t line = 0; line < images * height; ++line) {
            const int64_t i = line % height;
            const T* own = x + line * size;
            const T* above = i > 0 ? own - size : zeros.data();
            const T* below = i + 1 < height ? own + size : zeros.data();
            for (int64_t j = 0; j < size; ++j) of_rows[j] = above[j] + own[j] + below[j];
            for (int64_t j = 0; j < size; ++j)
                to[line * size + j] = of_rows[j - C] + of_rows[j] + of_rows[j + C] - own[j];
        }
    }
}

}  // namespace

#define GRID_SUM(T, NAME)                                                                        \
    extern "C" void vigpipe_grid_sum_##NAME(const T* x, T* to, int64_t images, int64_t height,   \
                                            int64_t width, int64_t C, int threads) {             \
        grid_sum(x, to, images, height, width, C, threads);                                      \
    }

GRID_SUM(float, float32)
GRID_SUM(double, float64)
