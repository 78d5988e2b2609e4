// Products of a few rows and w[K, N], which is read in place: the sixteen sums along K of tile.h one after
// another, with sixteen columns in the lanes. A strip is read in parts of K, with rows long enough for
// efficient memory access; the sums are kept in the L2 cache in between.
#pragma once

#include "scratch.h"
#include "tile.h"

namespace {

constexpr int64_t PART_DEPTH = 128;  // a multiple of the step

// Width of a tile of R rows, in vectors of sixteen columns.
#if defined(__AVX512F__)
constexpr int vectors(int rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int vectors(int rows) { return rows == 1 ? 4 : 2; }
#endif

// Elements of a step that belong to one of the sixteen sums.
template <typename T> constexpr int EACH = STEP<T> / 16;

// Adds the products of row k of w, or of a pair of rows, the odd one first: `n` columns, FULL if that is the
// tile's width. Only the first `there` rows exist; the others are zeros.
template <int R, int V, bool FULL, typename T>
static INLINE inline void add_products(f32x16 (&acc)[R][V], const Input<T> *x, int64_t x_row,
                                       const T *w, int64_t stride, int n, int there) {
    each<PARTS<T>>([&](auto part) INLINE {
        constexpr int ROW = PARTS<T> - 1 - part;
        const bool exists = there > ROW;
        const T *at = w + ROW * stride;
        f32x16 b[V];
        each<V>([&](auto v) INLINE {
            const int count = exists ? std::max(0, std::min(16, n - 16 * v)) : 0;
            b[v] = FULL && exists ? load(at + 16 * v) : load_first(at + 16 * v, count);
        });
        each<R>([&](auto r) INLINE {
            const f32x16 a = splat(exists ? to_float(x[r * x_row + 16 * part]) : 0.0f);
            each<V>([&](auto v) INLINE { acc[r][v] = mac(acc[r][v], a, b[v]); });
        });
    });
}
static INLINE inline void in_order(f32x16 *, int, const float *) {}

#if defined(__AVX512BF16__)
// Two rows of w, interleaved for the dot product of pairs. This leaves columns 0-3, 8-11, .. in one
// accumulator and 4-7, 12-15, .. in the next.
template <int R, int V, bool FULL>
static INLINE inline void add_products(f32x16 (&acc)[R][V], const bf16 *x, int64_t x_row, const bf16 *w,
                                       int64_t stride, int n, int there) {
    __m512bh b[V];
    each<V / 2>([&](auto i) INLINE {
        const auto line = [&](const bf16 *row, bool exists) INLINE {
            if (FULL && exists) return _mm512_loadu_si512(row + 32 * i);
            const int count = exists ? std::max(0, std::min(32, n - 32 * i)) : 0;
            return _mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), row + 32 * i);
        };
        const __m512i even = line(w, there > 0), odd = line(w + stride, there > 1);
        b[2 * i] = (__m512bh)_mm512_unpacklo_epi16(even, odd);
        b[2 * i + 1] = (__m512bh)_mm512_unpackhi_epi16(even, odd);
    });
    each<R>([&](auto r) INLINE {
        uint32_t pair = 0;
        if (there == 2) std::memcpy(&pair, x + r * x_row, 4);
        else if (there) pair = x[r * x_row];
        const __m512bh a = (__m512bh)_mm512_set1_epi32((int)pair);
        each<V>([&](auto v) INLINE { acc[r][v] = mac(acc[r][v], a, b[v]); });
    });
}
static INLINE inline void in_order(f32x16 *v, int count, const bf16 *) {
    for (int i = 0; i < count; i += 2) {
        const f32x16 a = v[i], b = v[i + 1];
        v[i] = PICK(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        v[i + 1] = PICK(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }
}
#else
static INLINE inline void in_order(f32x16 *, int, const bf16 *) {}
#endif

// Computes columns `col` to `col + n` over the part `begin` to `end` of K; `w` are their weights at `begin`.
// Calls `fetch` for each of the sixteen sums.
template <int R, bool FULL, typename T, typename Fetch>
static NOINLINE void column_tile(const Place<T> &p, const T *w, int64_t stride, int64_t col, int n,
                                 int64_t begin, int64_t end, f32x16 *kept, Fetch fetch) {
    constexpr int V = vectors(R), S = STEP<T>;
    const int64_t steps = (end - begin) / S, x_step = S * p.x_step;
    const int rest = (int)((end - begin) % S);
    auto *sums = (f32x16(*)[R][V])kept;
    constexpr int APART = EACH<T> / PARTS<T>;  // elements of a row's step between two sums
    for (int lane = 0; lane < 16; lane++) {
        fetch(lane);
        const Input<T> *x = p.x + APART * lane + begin / S * x_step;
        const T *at = w + EACH<T> * lane * stride;
        f32x16 acc[R][V];
        each<R>([&](auto r) INLINE {
            each<V>([&](auto v) INLINE { acc[r][v] = begin ? sums[lane][r][v] : f32x16{}; });
        });
        for (int64_t i = 0; i < steps; i++, x += x_step, at += S * stride)
            add_products<R, V, FULL>(acc, x, p.x_row, at, stride, n, EACH<T>);
        if (rest)  // pads the step with zeros
            add_products<R, V, FULL>(acc, x, p.x_row, at, stride, n,
                                     std::max(0, std::min(EACH<T>, rest - EACH<T> * lane)));
        each<R>([&](auto r) INLINE { each<V>([&](auto v) INLINE { sums[lane][r][v] = acc[r][v]; }); });
    }
    if (end < p.depth) return;
    for (int width = 8; width; width /= 2)  // by the tree of vb::sum
        for (int i = 0; i < width; i++)
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) sums[i][r][v] = sums[i][r][v] + sums[i + width][r][v];
    for (int r = 0; r < R; r++) {
        in_order(sums[0][r], V, w);
        (p.out + r * p.out_stride + col).as_pointer([&](auto *out) INLINE {
            for (int i = 0; i < n; i += 16, out += 16) {
                const int count = std::min(16, n - i);
                f32x16 v = sums[0][r][i / 16];
                if (p.bias) v += load_first(p.bias + col + i, count);
                store_first(out, v, count);
            }
        });
    }
}

// The tiles share the prefetching of the next part, or at the end, of the strip at `after`, if any.
template <int R, typename T>
static void column_strip(const Place<T> &p, const T *w, int64_t stride, int64_t width, const char *after) {
    constexpr int COLS = 16 * vectors(R), SUMS = 16 * R * vectors(R);
    const int64_t tiles = (width + COLS - 1) / COLS, bytes = width * (int64_t)sizeof(T);
    const int64_t rows = (PART_DEPTH + 16 * tiles - 1) / (16 * tiles);  // to prefetch for each sum
    const Scratch<f32x16> kept(tiles * SUMS);
    for (int64_t begin = 0; begin == 0 || begin < p.depth; begin += PART_DEPTH) {
        const int64_t end = std::min(begin + PART_DEPTH, p.depth);
        const char *next = end < p.depth ? (const char *)(w + end * stride) : after;
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t col = i * COLS;
            const int n = (int)std::min<int64_t>(COLS, width - col);
            const auto fetch = [&](int64_t sum) INLINE {
                if (!next) return;
                const char *row = next + (16 * i + sum) * rows * stride * (int64_t)sizeof(T);
                for (int64_t r = 0; r < rows; r++, row += stride * sizeof(T))
                    for (int64_t b = 0; b < bytes; b += 64) prefetch<true>(row + b);
            };
            const auto tile = [&](auto full) INLINE {
                column_tile<R, full.value>(p, w + begin * stride + col, stride, col, n, begin, end,
                                           kept.data + i * SUMS, fetch);
            };
            if (n == COLS) tile(std::true_type());
            else tile(std::false_type());
        }
    }
}

}  // namespace
