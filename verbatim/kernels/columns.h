// Matrix products with w[K, N]: sixteen columns in the lanes, k ascending in one accumulator each.
//
// Also what both kinds of product share: the operands, and one step along K.
#pragma once

#include <algorithm>
#include <omp.h>
#include <utility>

#include "simd.h"
#include "threads.h"

#define INLINE __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

namespace {

using namespace vb;

// f(0), .., f(N - 1), unrolled before the compiler decides what lives in registers.
template <typename F, int... I>
static INLINE inline void each_of([[maybe_unused]] F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F> static INLINE inline void each(F f) {
    each_of(f, std::make_integer_sequence<int, N>());
}

template <typename T, typename O> struct Product {
    O *out;
    const T *x, *w, *bias;
    int64_t rows, cols, depth, x_stride, w_stride, out_stride;
};

#if defined(__AVX512F__)
constexpr int ROWS = 6;  // 6 x 4 accumulators, 4 weights and a row fit 32 registers
#else
constexpr int ROWS = 1;
#endif

static inline void store_all(float *p, f32x16 v) { store(p, v); }
static inline void store_all(bf16 *p, f32x16 v) {
    u16x16 bits = narrow(v);
    std::memcpy(p, &bits, sizeof bits);
}

// ---- one step: STEP values of either operand, and their products added to an accumulator ----

static inline f32x16 load_step(const float *p) { return load(p); }
static inline f32x16 mac(f32x16 acc, f32x16 a, f32x16 b) { return fma(a, b, acc); }

#if defined(__AVX512F__)
static inline f32x16 load_step_first(const float *p, int n) {
    return (f32x16)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
#else
static inline f32x16 load_step_first(const float *p, int n) { return load_first(p, n); }
#endif

#if defined(__AVX512BF16__)
template <typename T> constexpr int STEP = 64 / sizeof(T);
static inline __m512bh load_step(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
static inline __m512bh load_step_first(const bf16 *p, int n) {
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
}
static inline f32x16 mac(f32x16 acc, __m512bh a, __m512bh b) {
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, a, b);
}
#else
template <typename T> constexpr int STEP = 16;
static inline f32x16 load_step(const bf16 *p) { return load(p); }
static inline f32x16 load_step_first(const bf16 *p, int n) { return load_first(p, n); }
#endif

// ---- a tile: R rows by 64 columns, over part of K ----

constexpr int VECTORS = 4, TILE_COLS = 16 * VECTORS;

// Sixteen columns of a row of weights, from 16v on, of which n - 16v exist; FULL when all do.
template <bool FULL, typename T> static INLINE inline f32x16 columns(const T *w, int v, int n) {
    return FULL ? load(w + 16 * v) : load_first(w + 16 * v, std::max(0, std::min(16, n - 16 * v)));
}

template <bool FULL, int R, typename T>
static INLINE inline void accumulate(f32x16 (&acc)[R][VECTORS], const T *x, int64_t x_stride,
                                     const T *w, int64_t w_stride, int64_t depth, int n) {
    for (int64_t k = 0; k < depth; k++, w += w_stride) {
        f32x16 b0 = columns<FULL>(w, 0, n), b1 = columns<FULL>(w, 1, n);
        f32x16 b2 = columns<FULL>(w, 2, n), b3 = columns<FULL>(w, 3, n);
        each<R>([&](auto r) INLINE {
            f32x16 a = splat(to_float(x[r * x_stride + k]));
            acc[r][0] = fma(a, b0, acc[r][0]);
            acc[r][1] = fma(a, b1, acc[r][1]);
            acc[r][2] = fma(a, b2, acc[r][2]);
            acc[r][3] = fma(a, b3, acc[r][3]);
        });
    }
}

#if defined(__AVX512BF16__)
// Two rows of weights at a time, interleaved, as the dot product of pairs wants them. The
// interleaving leaves columns 0-3, 8-11, .. in one accumulator and 4-7, 12-15, .. in the next.
template <bool FULL, int R>
static INLINE inline void accumulate(f32x16 (&acc)[R][VECTORS], const bf16 *x, int64_t x_stride,
                                     const bf16 *w, int64_t w_stride, int64_t depth, int n) {
    const __mmask32 left = n < 32 ? (__mmask32)((1ull << n) - 1) : ~0u;
    const __mmask32 right = n < 32 ? 0 : (__mmask32)((1ull << (n - 32)) - 1);
    auto pair = [&](int64_t k, auto both) INLINE {  // the last row of an odd K has zeros beside it
        const bf16 *even = w + k * w_stride, *odd = both ? even + w_stride : even;
        __m512i e0, e1, o0 = _mm512_setzero_si512(), o1 = o0;
        if (FULL) {
            e0 = _mm512_loadu_si512(even), e1 = _mm512_loadu_si512(even + 32);
            if (both) o0 = _mm512_loadu_si512(odd), o1 = _mm512_loadu_si512(odd + 32);
        } else {
            e0 = _mm512_maskz_loadu_epi16(left, even);
            e1 = _mm512_maskz_loadu_epi16(right, even + 32);
            if (both) {
                o0 = _mm512_maskz_loadu_epi16(left, odd);
                o1 = _mm512_maskz_loadu_epi16(right, odd + 32);
            }
        }
        __m512bh b0 = (__m512bh)_mm512_unpacklo_epi16(e0, o0);
        __m512bh b1 = (__m512bh)_mm512_unpackhi_epi16(e0, o0);
        __m512bh b2 = (__m512bh)_mm512_unpacklo_epi16(e1, o1);
        __m512bh b3 = (__m512bh)_mm512_unpackhi_epi16(e1, o1);
        each<R>([&](auto r) INLINE {
            uint32_t values = 0;
            std::memcpy(&values, x + r * x_stride + k, both ? 4 : 2);
            __m512bh a = (__m512bh)_mm512_set1_epi32((int)values);
            acc[r][0] = mac(acc[r][0], a, b0);
            acc[r][1] = mac(acc[r][1], a, b1);
            acc[r][2] = mac(acc[r][2], a, b2);
            acc[r][3] = mac(acc[r][3], a, b3);
        });
    };
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2) pair(k, std::true_type());
    if (k < depth) pair(k, std::false_type());
}

static inline void in_order(f32x16 *v, const bf16 *) {
    for (int i = 0; i < VECTORS; i += 2) {
        f32x16 a = v[i], b = v[i + 1];
        v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22,
                                       23);
        v[i + 1] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28,
                                           29, 30, 31);
    }
}
#else
static inline void in_order(f32x16 *, const bf16 *) {}
#endif
static inline void in_order(f32x16 *, const float *) {}

template <bool FULL, typename T, typename O>
static inline void finish_row(const Product<T, O> &p, f32x16 *v, int64_t row, int64_t col, int n) {
    in_order(v, p.x);
    O *out = p.out + row * p.out_stride + col;
    for (int i = 0; i < VECTORS; i++) {
        const int m = FULL ? 16 : std::max(0, std::min(16, n - 16 * i));
        if (p.bias) {
            const T *bias = p.bias + col + 16 * i;
            v[i] += FULL ? load(bias) : load_first(bias, m);
        }
        O lanes[16];
        store_all(lanes, v[i]);
        if (FULL) std::memcpy(out + 16 * i, lanes, sizeof lanes);
        else std::memcpy(out + 16 * i, lanes, m * sizeof(O));
    }
}

template <int R, bool FULL, typename T, typename O>
static NOINLINE void column_tile(const Product<T, O> &p, int64_t row, int64_t col, int n,
                                 int64_t begin, int64_t end, f32x16 *kept) {
    f32x16 acc[R][VECTORS];
    if (begin == 0) each<R * VECTORS>([&](auto i) INLINE { acc[i / 4][i % 4] = f32x16{}; });
    else each<R * VECTORS>([&](auto i) INLINE { acc[i / 4][i % 4] = kept[i]; });
    accumulate<FULL>(acc, p.x + row * p.x_stride + begin, p.x_stride,
                     p.w + begin * p.w_stride + col, p.w_stride, end - begin, n);
    each<R * VECTORS>([&](auto i) INLINE { kept[i] = acc[i / 4][i % 4]; });
    if (end == p.depth)
        for (int r = 0; r < R; r++) finish_row<FULL>(p, kept + r * VECTORS, row + r, col, n);
}

template <bool FULL, typename T, typename O>
static void column_tile_of(int64_t rows, const Product<T, O> &p, int64_t row, int64_t col, int n,
                           int64_t begin, int64_t end, f32x16 *kept) {
    switch (rows) {
    case 1: return column_tile<1, FULL>(p, row, col, n, begin, end, kept);
#if defined(__AVX512F__)
    case 2: return column_tile<2, FULL>(p, row, col, n, begin, end, kept);
    case 3: return column_tile<3, FULL>(p, row, col, n, begin, end, kept);
    case 4: return column_tile<4, FULL>(p, row, col, n, begin, end, kept);
    case 5: return column_tile<5, FULL>(p, row, col, n, begin, end, kept);
    case 6: return column_tile<6, FULL>(p, row, col, n, begin, end, kept);
#endif
    }
}

// ---- the product ----

// A strip of columns against a block of rows. K runs in short parts, so that the rows of weights
// are read along their columns, and a part serves all rows while it is in the cache.
constexpr int64_t STRIP_COLS = 256, STRIP_ROWS = 48, PART_DEPTH = 128;

template <typename T, typename O>
static void column_strip(const Product<T, O> &p, int64_t row, int64_t rows, int64_t col,
                         int64_t cols) {
    const int64_t panels = (rows + ROWS - 1) / ROWS;
    alignas(64) f32x16 kept[STRIP_ROWS * STRIP_COLS / 16];
    for (int64_t begin = 0; begin == 0 || begin < p.depth; begin += PART_DEPTH) {
        const int64_t end = std::min(begin + PART_DEPTH, p.depth);
        f32x16 *place = kept;
        for (int64_t i = 0; i < panels; i++) {
            const int64_t from = rows * i / panels, height = rows * (i + 1) / panels - from;
            for (int64_t c = col; c < col + cols; c += TILE_COLS, place += height * VECTORS) {
                const int n = (int)std::min<int64_t>(TILE_COLS, col + cols - c);
                if (n == TILE_COLS)
                    column_tile_of<true>(height, p, row + from, c, n, begin, end, place);
                else column_tile_of<false>(height, p, row + from, c, n, begin, end, place);
            }
        }
    }
}

template <typename T, typename O> static void by_columns(const Product<T, O> &p, int threads) {
    const int64_t strips = (p.cols + STRIP_COLS - 1) / STRIP_COLS;
    const int64_t blocks = (p.rows + STRIP_ROWS - 1) / STRIP_ROWS;
#pragma omp parallel for schedule(dynamic) collapse(2) num_threads(threads_at_once(threads))
    for (int64_t s = 0; s < strips; s++)
        for (int64_t b = 0; b < blocks; b++)
            column_strip(p, b * STRIP_ROWS, std::min(STRIP_ROWS, p.rows - b * STRIP_ROWS),
                         s * STRIP_COLS, std::min(STRIP_COLS, p.cols - s * STRIP_COLS));
}

}  // namespace
