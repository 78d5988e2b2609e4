// Matrix products whose bits cannot depend on the schedule.
//
// Every element of the output is one fixed sequence of arithmetic along K. How many rows there are,
// which tile an element falls in and which thread computes it decide only when that sequence runs.
//
//   w[N, K], as nn.Linear stores it: sixteen float accumulators along K, summed by vb::sum's tree.
//   w[K, N], as GPT-2 stores it: one float accumulator, k ascending (columns.h).
//
// Weights are read where they are and never packed. The bias is added in float and the result
// rounded once.

#include "columns.h"

namespace {

// ---- sums of the lanes of many accumulators at once, each by the tree of vb::sum ----

#define PICK __builtin_shufflevector

static inline f32x16 add_halves(f32x16 a, f32x16 b) {
    return PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
static inline f32x16 add_quarters(f32x16 a, f32x16 b) {
    return PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
static inline f32x16 add_pairs(f32x16 a, f32x16 b) {
    return PICK(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           PICK(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
static inline f32x16 add_neighbours(f32x16 a, f32x16 b) {
    return PICK(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           PICK(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

constexpr int COLS = 4;

// Rows FIRST to FIRST + 3, as far as there are any, of a tile's accumulators. Lanes 4r to 4r + 3 of
// the result are the four columns of row FIRST + r.
template <int FIRST, int R> static INLINE inline f32x16 sums(const f32x16 (&acc)[R][COLS]) {
    constexpr int LEFT = R - FIRST;
    f32x16 quarter[COLS];
    each<COLS>([&](auto c) INLINE {
        constexpr int C = c.value;
        f32x16 upper = add_halves(acc[FIRST][C], acc[FIRST + (LEFT > 1 ? 1 : 0)][C]);
        f32x16 lower = upper;
        if constexpr (LEFT > 2)
            lower = add_halves(acc[FIRST + 2][C], acc[FIRST + (LEFT > 3 ? 3 : 2)][C]);
        quarter[C] = add_quarters(upper, lower);
    });
    return add_neighbours(add_pairs(quarter[0], quarter[1]), add_pairs(quarter[2], quarter[3]));
}

template <typename T, typename O>
static inline void finish(const Product<T, O> &p, f32x16 v, int64_t row, int rows, int64_t col,
                          int cols) {
    if (p.bias) {
        float b[COLS] = {};
        for (int c = 0; c < cols; c++) b[c] = to_float(p.bias[col + c]);
        v += f32x16{b[0], b[1], b[2], b[3], b[0], b[1], b[2], b[3],
                    b[0], b[1], b[2], b[3], b[0], b[1], b[2], b[3]};
    }
    O lanes[16];
    store_all(lanes, v);
    O *out = p.out + row * p.out_stride + col;
    for (int r = 0; r < rows; r++, out += p.out_stride) {
        if (cols == COLS) std::memcpy(out, lanes + COLS * r, COLS * sizeof(O));
        else std::memcpy(out, lanes + COLS * r, cols * sizeof(O));
    }
}

// ---- a tile: R rows by up to four columns, over part of K ----

// What a tile has to know beside its place.
template <typename T> struct Part {
    int64_t begin, end;  // along K; all but the last part are whole steps
    f32x16 *kept;        // the accumulators between parts
    const T *ahead;      // weights that are wanted later
};

// Columns past the end repeat the last one and are not stored. Meanwhile FETCH columns of weights
// from `ahead` on are brought into the cache.
template <int R, int FETCH, typename T, typename O>
static NOINLINE void tile(const Product<T, O> &p, int64_t row, int64_t col, int cols,
                          const Part<T> &part) {
    const T *x = p.x + row * p.x_stride, *ahead = part.ahead;
    const int64_t x_stride = p.x_stride, w_stride = p.w_stride, end = part.end;
    const T *w0 = p.w + col * w_stride;
    const T *w1 = w0 + (cols > 1 ? w_stride : 0), *w2 = w1 + (cols > 2 ? w_stride : 0);
    const T *w3 = w2 + (cols > 3 ? w_stride : 0);
    int64_t k = part.begin;
    f32x16 acc[R][COLS];
    if (k == 0) each<R * COLS>([&](auto i) INLINE { acc[i / COLS][i % COLS] = f32x16{}; });
    else each<R * COLS>([&](auto i) INLINE { acc[i / COLS][i % COLS] = part.kept[i]; });
    auto step = [&](auto load) INLINE {
        auto b0 = load(w0 + k), b1 = load(w1 + k), b2 = load(w2 + k), b3 = load(w3 + k);
        each<FETCH>([&](auto c) INLINE { __builtin_prefetch(ahead + c * w_stride + k); });
        each<R>([&](auto r) INLINE {
            auto a = load(x + r * x_stride + k);
            acc[r][0] = mac(acc[r][0], a, b0);
            acc[r][1] = mac(acc[r][1], a, b1);
            acc[r][2] = mac(acc[r][2], a, b2);
            acc[r][3] = mac(acc[r][3], a, b3);
        });
    };
    for (; k + STEP<T> <= end; k += STEP<T>) step([](const T *at) INLINE { return load_step(at); });
    if (int rest = (int)(end - k))  // zeros fill the step up: this depends on K alone
        step([rest](const T *at) INLINE { return load_step_first(at, rest); });
    if (end < p.depth) {
        each<R * COLS>([&](auto i) INLINE { part.kept[i] = acc[i / COLS][i % COLS]; });
        return;
    }
    finish(p, sums<0>(acc), row, std::min(R, 4), col, cols);
    if constexpr (R > 4) finish(p, sums<4>(acc), row + 4, R - 4, col, cols);
}

template <int FETCH, typename T, typename O>
static void tile_of(int64_t rows, const Product<T, O> &p, int64_t row, int64_t col, int cols,
                    const Part<T> &part) {
    switch (rows) {
    case 1: return tile<1, FETCH>(p, row, col, cols, part);
#if defined(__AVX512F__)
    case 2: return tile<2, FETCH>(p, row, col, cols, part);
    case 3: return tile<3, FETCH>(p, row, col, cols, part);
    case 4: return tile<4, FETCH>(p, row, col, cols, part);
    case 5: return tile<5, FETCH>(p, row, col, cols, part);
    case 6: return tile<6, FETCH>(p, row, col, cols, part);
#endif
    }
}

// ---- the product ----

// How the work is cut, for time alone. A strip of columns stays in the second cache while the
// panels of a block of rows pass over it. Long rows are cut along K (the accumulators are kept
// meanwhile), so that a panel's part stays in the first cache for a whole group of columns.
constexpr int64_t GROUP = 32, STRIP_BYTES = 128 << 10, PART_BYTES = 2048, BLOCK_ROWS = 132;

template <typename T> static inline int64_t strip_width(int64_t depth) {
    const int64_t fit = STRIP_BYTES / std::max<int64_t>(1, depth * sizeof(T)) / GROUP * GROUP;
    return std::max(GROUP, std::min<int64_t>(64, fit));
}

// One strip of columns against some of the rows, in panels of nearly equal height.
template <typename T, typename O>
static void strip(const Product<T, O> &p, int64_t row, int64_t row_end, int64_t col,
                  int64_t width) {
    const int64_t rows = row_end - row, panels = (rows + ROWS - 1) / ROWS;
    const int64_t strip_end = std::min(col + width, p.cols);
    // The panels share the work of fetching the next strip. A single panel reads every weight
    // once, at memory speed: it runs along K in one part and fetches just the next tile.
    const bool alone = panels == 1;
    const int fetch = alone ? 4 : panels < 4 ? 2 : 1;
    const int64_t distance = alone ? COLS : width;
    const int64_t length = alone ? p.depth : PART_BYTES / (int64_t)sizeof(T);
    f32x16 kept[GROUP / COLS][ROWS * COLS];
    for (int64_t i = 0; i < panels; i++) {
        const int64_t height = rows * (i + 1) / panels - rows * i / panels;
        for (int64_t group = col; group < strip_end; group += GROUP) {
            const int64_t group_end = std::min(group + GROUP, strip_end);
            for (int64_t begin = 0, end = -1; end < p.depth; begin = end) {
                end = std::min(begin + length, p.depth);
                for (int64_t c = group; c < group_end; c += COLS) {
                    const int n = (int)std::min<int64_t>(COLS, group_end - c);
                    const int64_t next = c + distance + i * fetch;
                    const Part<T> part{begin, end, kept[(c - group) / COLS],
                                       p.w + next * p.w_stride};
                    if (i * fetch >= COLS || next + fetch > p.cols)
                        tile_of<0>(height, p, row, c, n, part);
                    else if (fetch == 1) tile_of<1>(height, p, row, c, n, part);
                    else if (fetch == 2) tile_of<2>(height, p, row, c, n, part);
                    else tile_of<4>(height, p, row, c, n, part);
                }
            }
        }
        row += height;
    }
}

template <typename T, typename O> static void by_rows(const Product<T, O> &p, int threads) {
    const int64_t width = strip_width<T>(p.depth), strips = (p.cols + width - 1) / width;
    const int64_t blocks = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel for schedule(dynamic) collapse(2) num_threads(threads)
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t s = 0; s < strips; s++)
            strip(p, p.rows * b / blocks, p.rows * (b + 1) / blocks, s * width, width);
}

// Waking the other threads costs some microseconds, and many more where other programs want the
// processor too; a product of that length runs where it is.
static int threads_for(int64_t rows, int64_t cols, int64_t depth, int threads) {
    if (cols * depth < (1 << 19) && rows * cols * depth < (1 << 22)) return 1;
    return threads > 0 ? threads : omp_get_max_threads();
}

}  // namespace

// out[rows, cols] = x[rows, depth] @ w + bias, with w[cols, depth] (vb_linear) or w[depth, cols]
// (vb_linear_t). Strides are of rows, in elements. `bias` may be null. `out_f32` keeps the
// result of bf16 operands in float32. `threads` 0 takes OpenMP's number.
#define EXPORT(name, method, T)                                                                    \
    extern "C" void name(void *out, const T *x, const T *w, const T *bias, int64_t rows,           \
                         int64_t cols, int64_t depth, int64_t x_stride, int64_t w_stride,          \
                         int64_t out_stride, int out_f32, int threads) {                           \
        threads = threads_for(rows, cols, depth, threads);                                         \
        if (out_f32)                                                                               \
            method(Product<T, float>{(float *)out, x, w, bias, rows, cols, depth, x_stride,        \
                                     w_stride, out_stride}, threads);                              \
        else                                                                                       \
            method(Product<T, T>{(T *)out, x, w, bias, rows, cols, depth, x_stride, w_stride,      \
                                 out_stride}, threads);                                            \
    }

EXPORT(vb_linear_f32, by_rows, float)
EXPORT(vb_linear_bf16, by_rows, bf16)
EXPORT(vb_linear_t_f32, by_columns, float)
EXPORT(vb_linear_t_bf16, by_columns, bf16)
