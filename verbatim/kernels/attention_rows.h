// Stored rows of keys and values, and the layout of a tile of them for the arithmetic.
//
// Rows are read as vectors of 32-bit lanes: 16 floats, or 16 pairs of neighbouring bf16. A tile's keys are
// joined in pairs and its values interleaved once, and then used by all lines that see the tile
// (attention_tile.h). The only computation here is dequantization.
#pragma once

#include "wide.h"

#include <algorithm>

#define INLINE inline __attribute__((always_inline))

namespace vb::attention {

typedef uint16_t u16x32 __attribute__((vector_size(64)));

constexpr int TILE = 64;  // keys of a tile, between two rescalings; tiles begin at multiples of this
constexpr int CHUNKS = TILE / 16;

// ---- Formats of stored rows ----

// Vector `i` of the lanes of a row. Only the last vector may be partial (not WHOLE); it is padded with zeros.
template <bool WHOLE> static INLINE u32x16 load_lanes(const char *row, int bytes, int i) {
    u32x16 lanes = {};
    if (WHOLE) std::memcpy(&lanes, row + 64 * i, 64);
    else std::memcpy(&lanes, row + 64 * i, bytes - 64 * i);
    return lanes;
}

struct FloatRows {
    static constexpr bool PAIRED = false;
    static int bytes(int width) { return width * 4; }
    template <bool WHOLE> static INLINE u32x16 lanes(const char *row, int width, int i) {
        return load_lanes<WHOLE>(row, width * 4, i);
    }
};

struct HalfRows {
    static constexpr bool PAIRED = true;
    static int bytes(int width) { return width * 2; }
    template <bool WHOLE> static INLINE u32x16 lanes(const char *row, int width, int i) {
        return load_lanes<WHOLE>(row, width * 2, i);
    }
};

struct Whole {
    static constexpr bool value = true;
};

struct Partial {
    static constexpr bool value = false;
};

// Calls f(i, Whole or Partial) for each vector of lanes of a row.
template <class Rows, bool EXACT = false, class Function>
static INLINE void each_vector(int width, const Function &f) {
    constexpr int ELEMENTS = Rows::PAIRED ? 32 : 16;
    for (int i = 0; i < width / ELEMENTS; i++) f(i, Whole());
    if (!EXACT && width % ELEMENTS) f(width / ELEMENTS, Partial());
}

// ---- Layout of a tile ----

#define LANES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

typedef float f32x4 __attribute__((vector_size(16)));

// Interleave within quarters the first two (low) or the last two (high) lanes of a and b.
#if defined(__AVX512F__)
static INLINE f32x16 low(f32x16 a, f32x16 b) {
    return LANES(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}

static INLINE f32x16 high(f32x16 a, f32x16 b) {
    return LANES(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
#else  // quarter by quarter: gcc splits a longer shuffle into single lanes
template <class Function> static INLINE f32x16 by_quarters(f32x16 a, f32x16 b, const Function &f) {
    f32x4 x[4], y[4];
    std::memcpy(x, &a, sizeof a), std::memcpy(y, &b, sizeof b);
    for (int i = 0; i < 4; i++) x[i] = f(x[i], y[i]);
    std::memcpy(&a, x, sizeof a);
    return a;
}

static INLINE f32x16 low(f32x16 a, f32x16 b) {
    return by_quarters(a, b, [](f32x4 x, f32x4 y) { return LANES(x, y, 0, 4, 1, 5); });
}

static INLINE f32x16 high(f32x16 a, f32x16 b) {
    return by_quarters(a, b, [](f32x4 x, f32x4 y) { return LANES(x, y, 2, 6, 3, 7); });
}
#endif

// ---- Prefetching ----

constexpr int AHEAD = 40;  // rows between the one in use and the one that is prefetched

// Prefetches vector `i` of the row AHEAD of rows[0]. A core can wait for a limited number of cache lines, so
// they are requested one by one, one per vector in use: many at once would stall the arithmetic and then
// leave the memory idle. A longer distance would evict data in use.
template <class Rows> static INLINE void fetch(const char *const *rows, int width, int i) {
    constexpr int ELEMENTS = Rows::PAIRED ? 32 : 16;
    const int vectors = (width + ELEMENTS - 1) / ELEMENTS;
    prefetch<false>(rows[AHEAD] + i * ((Rows::bytes(width) + vectors - 1) / vectors));
}

// Prefetches a whole row.
static INLINE void fetch_row(const char *row, int bytes) {
    for (int b = 0; b < bytes; b += 64) prefetch<false>(row + b);
}

// Interleave two rows of 32 bf16 within quarters: the first four of each quarter, or the last four.
#define FIRST4(a, b) LANES(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, \
    48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59)
#define LAST4(a, b) LANES(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, \
    52, 21, 53, 22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63)

// Vector `i` of the values of one step, in element order: two vectors of 16 if lanes hold two elements, else
// one. A step is one key, or with PAIRS the keys rows[0] and rows[1].
template <class Rows, bool PAIRS, bool WHOLE>
static INLINE void expand(const char *const *rows, int width, int i, f32x16 *out) {
    const u32x16 lanes = Rows::template lanes<WHOLE>(rows[0], width, i);
    if constexpr (PAIRS) {
        const u16x32 a = (u16x32)lanes;
        const u16x32 b = (u16x32)Rows::template lanes<WHOLE>(rows[1], width, i);
        out[0] = (f32x16)FIRST4(a, b), out[1] = (f32x16)LAST4(a, b);
    } else if constexpr (Rows::PAIRED) {
        u16x16 halves[2];
        std::memcpy(halves, &lanes, sizeof lanes);
        out[0] = widen(halves[0]), out[1] = widen(halves[1]);
    } else {
        out[0] = (f32x16)lanes;
    }
}

// Vector `i` of the keys rows[0] and rows[1] with interleaved lanes, so that one instruction multiplies both:
// four vectors if each key takes two, else two.
template <class Rows, bool PAIRS, bool WHOLE>
static INLINE void join(const char *const *rows, int width, int i, f32x16 *out) {
    constexpr int M = Rows::PAIRED && !PAIRS ? 2 : 1;
    f32x16 a[M], b[M];
    if constexpr (PAIRS) {
        a[0] = (f32x16)Rows::template lanes<WHOLE>(rows[0], width, i);
        b[0] = (f32x16)Rows::template lanes<WHOLE>(rows[1], width, i);
    } else {
        expand<Rows, false, WHOLE>(rows, width, i, a);
        expand<Rows, false, WHOLE>(rows + 1, width, i, b);
    }
    for (int m = 0; m < M; m++) out[2 * m] = low(a[m], b[m]), out[2 * m + 1] = high(a[m], b[m]);
}

// Stores vector `i` of a line, or with WIDE the two vectors of floats of its pairs, `apart` floats apart.
template <bool WIDE> static INLINE void put(float *line, int i, int apart, f32x16 v) {
#if defined(__AVX512BF16__)
    if constexpr (WIDE) {
        store(line + i * 2 * apart, odd_elements((u32x16)v));
        store(line + i * 2 * apart + apart, even_elements((u32x16)v));
        return;
    }
#endif
    store(line + i * apart, v);
}

// Lays out the keys [from, to) in pairs; those from key k on are at keys[k / 2 * stride]. WIDE: each vector
// of bf16 pairs becomes two of floats.
template <class Rows, bool PAIRS, bool WIDE>
static inline void lay_out_keys(const char *const *rows, int width, int from, int to, float *keys,
                                int stride) {
    constexpr int VECTORS = Rows::PAIRED && !PAIRS ? 4 : 2;
    for (int k = from; k < to; k += 2)
        each_vector<Rows>(width, [&](int i, auto whole) {
            f32x16 out[VECTORS];
            fetch<Rows>(rows + k, width, i), fetch<Rows>(rows + k + 1, width, i);
            join<Rows, PAIRS, whole.value>(rows + k, width, i, out);
            for (int n = 0; n < VECTORS; n++)
                put<WIDE>(keys + k / 2 * stride, i * VECTORS + n, 16, out[n]);
        });
}

// Lays out the values of keys [from, to): element e of step s goes to values[s * stride + e]. WIDE: a step of
// two keys becomes two steps of floats.
template <class Rows, bool PAIRS, bool WIDE>
static inline void lay_out_values(const char *const *rows, int width, int from, int to,
                                  float *values, int stride) {
    constexpr int KEYS = PAIRS ? 2 : 1, VECTORS = Rows::PAIRED ? 2 : 1;
    for (int s = from / KEYS; s * KEYS < to; s++) {
        each_vector<Rows>(width, [&](int i, auto whole) {
            for (int k = 0; k < KEYS; k++) fetch<Rows>(rows + s * KEYS + k, width, i);
            f32x16 out[VECTORS];
            expand<Rows, PAIRS, whole.value>(rows + s * KEYS, width, i, out);
            for (int n = 0; n < VECTORS; n++) {
                if constexpr (WIDE)
                    put<true>(values + 2 * s * stride + (i * VECTORS + n) * 16, 0, stride, out[n]);
                else store(values + s * stride + (i * VECTORS + n) * 16, out[n]);
            }
        });
    }
}

}  // namespace vb::attention
