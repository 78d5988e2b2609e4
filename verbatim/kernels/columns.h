// Matrix products with w[K, N]: sixteen columns in the lanes, k ascending in one accumulator each.
//
// Also what both kinds of product share: the operands, and one step along K.
#pragma once

#include <algorithm>
#include <omp.h>
#include <type_traits>
#include <utility>

#include <vector>

#include "packed.h"
#include "scratch.h"
#include "threads.h"

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

// Where a product of T is written: rounded to T, or as the floats that its sums are.
template <typename T> struct Output {
    void *at;
    bool floats;  // T float: either, and nothing is decided at run time
    Output operator+(int64_t n) const {
        return {(char *)at + n * (int64_t)(floats ? sizeof(float) : sizeof(T)), floats};
    }
    template <typename F> INLINE inline void as_pointer(F f) const {
        if (std::is_same_v<T, float> || floats) f((float *)at);
        else f((T *)at);
    }
};

template <typename T> struct Product {
    Output<T> out;
    const T *x, *w, *bias;
    int64_t rows, cols, depth, x_stride, w_stride, out_stride;
    int format, group;  // of a weight that is quantized down its columns; 0: it is plain
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

#if defined(__AVX2__) && !defined(__AVX512F__)
// Sixteen lanes in two registers. Of a vector that is longer than a register gcc keeps each value in memory.
struct Lanes {
    __m256 low, high;
};
static INLINE inline Lanes lanes_at(const float *p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
static INLINE inline __m256 eight_at(const bf16 *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static INLINE inline Lanes lanes_at(const bf16 *p) { return {eight_at(p), eight_at(p + 8)}; }
static INLINE inline Lanes spread(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static INLINE inline Lanes mac(Lanes acc, Lanes a, Lanes b) {
    return {_mm256_fmadd_ps(a.low, b.low, acc.low), _mm256_fmadd_ps(a.high, b.high, acc.high)};
}
static INLINE inline f32x16 as_vector(Lanes v) {
    f32x16 out;
    std::memcpy(&out, &v, sizeof out);
    return out;
}
static INLINE inline float sum(Lanes v) {  // by the tree of vb::sum
    const __m256 eight = _mm256_add_ps(v.low, v.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
typedef f32x16 Lanes;
template <typename T> static INLINE inline Lanes lanes_at(const T *p) { return load(p); }
static INLINE inline Lanes spread(float x) { return splat(x); }
static INLINE inline Lanes mac(Lanes acc, Lanes a, Lanes b) { return fma(a, b, acc); }
static INLINE inline f32x16 as_vector(Lanes v) { return v; }
#endif

template <typename T> static INLINE inline Lanes lanes_first(const T *p, int n) {
    T lanes[16] = {};
    std::memcpy(lanes, p, n * sizeof(T));
    return lanes_at((const T *)lanes);
}

static INLINE inline Lanes load_step(const float *p) { return lanes_at(p); }
#if defined(__AVX512F__)
static inline f32x16 load_step_first(const float *p, int n) {
    return (f32x16)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
#else
static INLINE inline Lanes load_step_first(const float *p, int n) { return lanes_first(p, n); }
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
static INLINE inline Lanes load_step(const bf16 *p) { return lanes_at(p); }
static INLINE inline Lanes load_step_first(const bf16 *p, int n) { return lanes_first(p, n); }
#endif

// What tiles read rows as: where bf16 is widened for each product, once for all columns.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <typename T> using Input = float;
static inline void copy_inputs(float *to, const bf16 *from, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, eight_at(from + i));
    for (; i < n; i++) to[i] = to_float(from[i]);
}
#else
template <typename T> using Input = T;
#endif
template <typename T> static inline void copy_inputs(T *to, const T *from, int64_t n) {
    std::memcpy(to, from, n * sizeof(T));
}

// ---- a tile: R rows by 64 columns, over part of K ----

constexpr int VECTORS = 4;
constexpr int64_t TILE_COLS = 16 * VECTORS;

// The lines of a tile's row of weights, to be there when they are needed.
template <typename T> static INLINE inline void fetch_columns(const T *w) {
    for (size_t i = 0; i < TILE_COLS * sizeof(T); i += 64)
        __builtin_prefetch((const char *)w + i, 0, 2);
}

// Sixteen columns of a row of weights, from 16v on, of which n - 16v exist; FULL when all do.
template <bool FULL, typename T> static INLINE inline Lanes columns(const T *w, int v, int n) {
    return FULL ? lanes_at(w + 16 * v)
                : lanes_first(w + 16 * v, std::max(0, std::min(16, n - 16 * v)));
}

template <bool FULL, int R, typename T>
static INLINE inline void accumulate(Lanes (&acc)[R][VECTORS], const T *x, int64_t x_stride,
                                     const T *w, int64_t w_stride, int64_t depth, int n,
                                     int64_t ahead) {
    for (int64_t k = 0; k < depth; k++, w += w_stride) {
        if (ahead) fetch_columns(w + ahead);
        const Lanes b0 = columns<FULL>(w, 0, n), b1 = columns<FULL>(w, 1, n);
        const Lanes b2 = columns<FULL>(w, 2, n), b3 = columns<FULL>(w, 3, n);
        each<R>([&](auto r) INLINE {
            const Lanes a = spread(to_float(x[r * x_stride + k]));
            acc[r][0] = mac(acc[r][0], a, b0);
            acc[r][1] = mac(acc[r][1], a, b1);
            acc[r][2] = mac(acc[r][2], a, b2);
            acc[r][3] = mac(acc[r][3], a, b3);
        });
    }
}

#if defined(__AVX512BF16__)
// Two rows of weights at a time, interleaved, as the dot product of pairs wants them. The
// interleaving leaves columns 0-3, 8-11, .. in one accumulator and 4-7, 12-15, .. in the next.
template <bool FULL, int R>
static INLINE inline void accumulate(f32x16 (&acc)[R][VECTORS], const bf16 *x, int64_t x_stride,
                                     const bf16 *w, int64_t w_stride, int64_t depth, int n,
                                     int64_t ahead) {
    const __mmask32 left = n < 32 ? (__mmask32)((1ull << n) - 1) : ~0u;
    const __mmask32 right = n < 32 ? 0 : (__mmask32)((1ull << (n - 32)) - 1);
    auto pair = [&](int64_t k, auto both) INLINE {  // the last row of an odd K has zeros beside it
        const bf16 *even = w + k * w_stride, *odd = both ? even + w_stride : even;
        if (ahead) fetch_columns(even + ahead), fetch_columns(odd + ahead);
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
static inline void in_order(Lanes *, const bf16 *) {}
#endif
static inline void in_order(Lanes *, const float *) {}

template <bool FULL, typename T>
static inline void finish_row(const Product<T> &p, Lanes *v, int64_t row, int64_t col, int n) {
    in_order(v, p.x);
    (p.out + row * p.out_stride + col).as_pointer([&](auto *out) INLINE {
        std::remove_pointer_t<decltype(out)> lanes[16];
        for (int i = 0; i < VECTORS; i++) {
            const int m = FULL ? 16 : std::max(0, std::min(16, n - 16 * i));
            f32x16 sums = as_vector(v[i]);
            if (p.bias) {
                const T *bias = p.bias + col + 16 * i;
                sums += FULL ? load(bias) : load_first(bias, m);
            }
            store_all(lanes, sums);
            if (FULL) std::memcpy(out + 16 * i, lanes, sizeof lanes);
            else std::memcpy(out + 16 * i, lanes, m * sizeof *lanes);
        }
    });
}

// Columns from `col` on, over K from `begin` to `end`; `w` is their weight at `begin`.
template <int R, bool FULL, typename T>
static NOINLINE void column_tile(const Product<T> &p, const T *w, int64_t w_stride, int64_t row,
                                 int64_t col, int n, int64_t begin, int64_t end, int64_t ahead,
                                 Lanes *kept) {
    Lanes acc[R][VECTORS];
    if (begin == 0) each<R * VECTORS>([&](auto i) INLINE { acc[i / 4][i % 4] = Lanes{}; });
    else each<R * VECTORS>([&](auto i) INLINE { acc[i / 4][i % 4] = kept[i]; });
    accumulate<FULL>(acc, p.x + row * p.x_stride + begin, p.x_stride, w, w_stride, end - begin, n,
                     ahead);
    each<R * VECTORS>([&](auto i) INLINE { kept[i] = acc[i / 4][i % 4]; });
    if (end == p.depth)
        for (int r = 0; r < R; r++) finish_row<FULL>(p, kept + r * VECTORS, row + r, col, n);
}

template <bool FULL, typename T>
static void column_tile_of(int64_t rows, const Product<T> &p, const T *w, int64_t w_stride,
                           int64_t row, int64_t col, int n, int64_t begin, int64_t end,
                           int64_t ahead, Lanes *kept) {
    switch (rows) {
#define HEIGHT(R)                                                                                  \
    case R: return column_tile<R, FULL>(p, w, w_stride, row, col, n, begin, end, ahead, kept);
        HEIGHT(1)
#if defined(__AVX512F__)
        HEIGHT(2)
        HEIGHT(3)
        HEIGHT(4)
        HEIGHT(5)
        HEIGHT(6)
#endif
#undef HEIGHT
    }
}

// ---- the product ----

// A strip of columns against a block of rows. K runs in parts, so that the rows of weights are read
// along their columns, and a part serves all rows while it is in the cache. Few rows have wide strips
// and short parts: as many streams from memory as a part has rows of weights.
constexpr int64_t STRIP_COLS = 256, STRIP_ROWS = 48, PART_DEPTH = 128;
constexpr int64_t FEW_COLUMN_ROWS = ROWS > 1 ? 24 : 4, FEW_DEPTH = 16;

template <typename T> static bool few(const Product<T> &p) {
    return p.rows <= FEW_COLUMN_ROWS && !p.format;
}

// Numbers of a part of a strip: as they are, or read back to `room`.
template <typename T>
static const T *numbers_at(const Product<T> &p, int64_t begin, int64_t end, int64_t col,
                           int64_t cols, T *room) {
    if (!p.format) return p.w + begin * p.w_stride + col;
    const RowLayout layout(p.depth, p.format, p.group);
    const int64_t group_bytes = p.cols * (layout.head_bytes + p.group * layout.bits / 8);
    of_code(p.format, [&](auto code) {
        for (int64_t k = begin; k < end; k += p.group) {
            const int size = (int)std::min<int64_t>(p.group, p.depth - k);
            const auto *at = (const uint8_t *)p.w + k / p.group * group_bytes;
            unpack_columns<code.value>(room + (k - begin) * cols, cols, at, layout, size, p.cols, col,
                                       col + cols);
        }
    });
    return room;
}

template <typename T>
static void column_strip(const Product<T> &p, int64_t row, int64_t rows, int64_t col,
                         int64_t cols) {
    const int64_t panels = (rows + ROWS - 1) / ROWS, tiles = (cols + TILE_COLS - 1) / TILE_COLS;
    const int64_t part = few(p) ? FEW_DEPTH : PART_DEPTH;
    const Scratch<Lanes> kept(rows * tiles * VECTORS);
    const Scratch<T> room(p.format ? PART_DEPTH * cols : 0);
    const int64_t w_stride = p.format ? cols : p.w_stride;
    for (int64_t begin = 0; begin == 0 || begin < p.depth; begin += part) {
        const int64_t end = std::min(begin + part, p.depth);
        const T *w = numbers_at(p, begin, end, col, cols, room.data);
        const int64_t ahead = few(p) && end < p.depth ? part * w_stride : 0;  // the next part
        Lanes *place = kept.data;
        for (int64_t i = 0; i < panels; i++) {
            const int64_t from = rows * i / panels, height = rows * (i + 1) / panels - from;
            for (int64_t c = 0; c < cols; c += TILE_COLS, place += height * VECTORS) {
                const int n = (int)std::min<int64_t>(TILE_COLS, cols - c);
                if (n == TILE_COLS)
                    column_tile_of<true>(height, p, w + c, w_stride, row + from, col + c, n, begin,
                                         end, ahead, place);
                else
                    column_tile_of<false>(height, p, w + c, w_stride, row + from, col + c, n,
                                          begin, end, ahead, place);
            }
        }
    }
}

template <typename T>
static void by_columns(const std::vector<Product<T>> &products, int threads) {
    int64_t all = 0, count = 0;
    for (const auto &p : products) all += p.cols;
    const int64_t share = all / (2 * threads) / TILE_COLS * TILE_COLS;
    struct Cut {
        int64_t end, strips, width;
    };
    std::vector<Cut> cuts;
    for (const auto &p : products) {
        const int64_t widest = few(p) ? 32 * STRIP_COLS : STRIP_COLS;
        const int64_t width = few(p) ? std::clamp(share, TILE_COLS, widest) : widest;
        const int64_t strips = (p.cols + width - 1) / width;
        count += strips * ((p.rows + STRIP_ROWS - 1) / STRIP_ROWS);
        cuts.push_back({count, strips, width});
    }
    share_out(count, threads, [&](int) {
        return [&](int64_t n, int64_t) {
            size_t i = 0;
            while (n >= cuts[i].end) i++;
            const Product<T> &p = products[i];
            const int64_t local = n - (i ? cuts[i - 1].end : 0), width = cuts[i].width;
            const int64_t row = local / cuts[i].strips * STRIP_ROWS;
            const int64_t col = local % cuts[i].strips * width;
            column_strip(p, row, std::min(STRIP_ROWS, p.rows - row), col,
                         std::min(width, p.cols - col));
        };
    });
}

}  // namespace
