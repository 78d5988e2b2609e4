// Rows of keys and values as they are stored, and a tile of them laid out for the arithmetic.
//
// Rows are read as vectors of 32-bit lanes: 16 floats, or 16 pairs of neighbouring bf16. A tile's
// keys are joined two by two and its values interleaved once, and then used by all lines that see
// the tile (attention_tile.h). Nothing is computed here but what a format says that a row holds.
#pragma once

#include "simd.h"

#include <algorithm>

#define INLINE inline __attribute__((always_inline))

namespace vb::attention {

typedef uint16_t u16x32 __attribute__((vector_size(64)));

constexpr int TILE = 64;  // keys between two rescalings, at absolute positions
constexpr int CHUNKS = TILE / 16;

// ---- Formats of stored rows ----

// Vector `i` of the lanes of a row of `width` elements. Only the last one may not be WHOLE: what it
// lacks is zero.
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

// f(i, Whole or Partial) for each vector of lanes of a row.
template <class Rows, bool EXACT = false, class Function>
static INLINE void each_vector(int width, const Function &f) {
    constexpr int ELEMENTS = Rows::PAIRED ? 32 : 16;
    for (int i = 0; i < width / ELEMENTS; i++) f(i, Whole());
    if (!EXACT && width % ELEMENTS) f(width / ELEMENTS, Partial());
}

// ---- Laying out a tile ----

#define LANES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

typedef float f32x4 __attribute__((vector_size(16)));

// Within quarters: the first two or the last two lanes of both, interleaved one by one.
#if defined(__AVX512F__)
static INLINE f32x16 low(f32x16 a, f32x16 b) {
    return LANES(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}

static INLINE f32x16 high(f32x16 a, f32x16 b) {
    return LANES(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
#else  // quarter by quarter: gcc takes a longer shuffle apart, lane by lane
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

// ---- What comes next ----

constexpr int AHEAD = 40;  // rows between the one that is used and the one that is fetched

// Fetches vector `i` of the row AHEAD of rows[0]. A core waits for only so many lines at a time, so
// they are asked for one by one, with each vector that is used: many at once would hold up the
// arithmetic, and then leave the memory idle. Farther ahead they would drive out what is in use.
template <class Rows> static INLINE void fetch(const char *const *rows, int width, int i) {
    constexpr int ELEMENTS = Rows::PAIRED ? 32 : 16;
    const int vectors = (width + ELEMENTS - 1) / ELEMENTS;
    __builtin_prefetch(rows[AHEAD] + i * ((Rows::bytes(width) + vectors - 1) / vectors));
}

// A whole row at once.
static INLINE void fetch_row(const char *row, int bytes) {
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch(row + b);
}

// Two rows of 32 bf16, interleaved one by one within quarters: their first halves, and their last.
#define FIRST4(a, b) LANES(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, \
    48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59)
#define LAST4(a, b) LANES(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, \
    52, 21, 53, 22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63)

// Vector `i` of the values of one step, in the order of the elements: two vectors of 16 where lanes
// hold two elements, else one. A step is a key, or with PAIRS the keys rows[0] and rows[1].
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

// Vector `i` of the keys rows[0] and rows[1] for a product: their lanes interleaved, so that one
// instruction serves both. Four vectors where each takes two, else two.
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

// The keys of [from, to), two by two: those from key k on at keys[k / 2 * stride].
template <class Rows, bool PAIRS>
static inline void lay_out_keys(const char *const *rows, int width, int from, int to, float *keys,
                                int stride) {
    constexpr int VECTORS = Rows::PAIRED && !PAIRS ? 4 : 2;
    for (int k = from; k < to; k += 2)
        each_vector<Rows>(width, [&](int i, auto whole) {
            f32x16 out[VECTORS];
            fetch<Rows>(rows + k, width, i), fetch<Rows>(rows + k + 1, width, i);
            join<Rows, PAIRS, whole.value>(rows + k, width, i, out);
            for (int n = 0; n < VECTORS; n++)
                store(keys + k / 2 * stride + (i * VECTORS + n) * 16, out[n]);
        });
}

// The values of keys [from, to): element e of step s goes to values[s * stride + e].
template <class Rows, bool PAIRS>
static inline void lay_out_values(const char *const *rows, int width, int from, int to,
                                  float *values, int stride) {
    constexpr int KEYS = PAIRS ? 2 : 1, VECTORS = Rows::PAIRED ? 2 : 1;
    for (int s = from / KEYS; s * KEYS < to; s++) {
        each_vector<Rows>(width, [&](int i, auto whole) {
            for (int k = 0; k < KEYS; k++) fetch<Rows>(rows + s * KEYS + k, width, i);
            f32x16 out[VECTORS];
            expand<Rows, PAIRS, whole.value>(rows + s * KEYS, width, i, out);
            for (int n = 0; n < VECTORS; n++)
                store(values + s * stride + (i * VECTORS + n) * 16, out[n]);
        });
    }
}

}  // namespace vb::attention
