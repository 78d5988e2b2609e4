// Rows of keys and values as they are stored, and a tile of them laid out for the arithmetic.
//
// Rows are read as vectors of 32-bit lanes: 16 floats, or 16 pairs of neighbouring bf16. A tile's
// keys are transposed and its values interleaved once, and then used by all lines that see the tile
// (attention_tile.h). Nothing is computed here but what a format says that a row holds.
#pragma once

#include "simd.h"

#include <algorithm>

#define INLINE inline __attribute__((always_inline))

namespace vb::attention {

typedef uint16_t u16x32 __attribute__((vector_size(64)));

constexpr int TILE = 64;   // keys between two rescalings, at absolute positions
constexpr int CHUNK = 16;  // keys that are transposed together
constexpr int CHUNKS = TILE / CHUNK;

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
template <class Rows, class Function> static INLINE void each_vector(int width, const Function &f) {
    constexpr int ELEMENTS = Rows::PAIRED ? 32 : 16;
    for (int i = 0; i < width / ELEMENTS; i++) f(i, Whole());
    if (width % ELEMENTS) f(width / ELEMENTS, Partial());
}

// ---- Laying out a tile ----

#define LANES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

// Within quarters of a vector: the first two or the last two lanes of both, interleaved one by one
// or two by two. Then whole quarters: the even or the odd ones of both.
#define LOW1(a, b) LANES(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH1(a, b) LANES(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW2(a, b) LANES(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) LANES(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN4(a, b) LANES(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD4(a, b) LANES(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)

// 16 vectors of 16 lanes, rows to columns.
static INLINE void transpose(u32x16 *v) {
    u32x16 w[16];
    for (int k = 0; k < 16; k += 2)
        w[k] = LOW1(v[k], v[k + 1]), w[k + 1] = HIGH1(v[k], v[k + 1]);
    for (int k = 0; k < 16; k += 4)
        for (int j = 0; j < 2; j++) {
            v[k + 2 * j] = LOW2(w[k + j], w[k + j + 2]);
            v[k + 2 * j + 1] = HIGH2(w[k + j], w[k + j + 2]);
        }
    // Quarter b of v[4 g + j] is now column 4 b + j of rows 4 g to 4 g + 3.
    for (int j = 0; j < 4; j++) {
        const u32x16 even = EVEN4(v[j], v[4 + j]), even2 = EVEN4(v[8 + j], v[12 + j]);
        const u32x16 odd = ODD4(v[j], v[4 + j]), odd2 = ODD4(v[8 + j], v[12 + j]);
        w[j] = EVEN4(even, even2), w[8 + j] = ODD4(even, even2);
        w[4 + j] = EVEN4(odd, odd2), w[12 + j] = ODD4(odd, odd2);
    }
    for (int k = 0; k < 16; k++) v[k] = w[k];
}

// The rows of the next tile, fetched little by little while this one is computed: many at once
// would hold up the arithmetic, and none leave the memory idle.
struct Ahead {
    const char *const *rows;  // TILE of keys, TILE of values
    int k_bytes, v_bytes, next;

    INLINE void fetch(int count) {
        for (const int end = std::min(next + count, 2 * TILE); next < end; next++) {
            const int bytes = next < TILE ? k_bytes : v_bytes;
            for (int b = 0; b < bytes; b += 64) __builtin_prefetch(rows[next] + b);
        }
    }
};

// The keys of chunks [from, to) into columns: step s of key k goes to columns[s * TILE + k]. A step
// is an element, or with PAIRS two neighbouring ones.
template <class Rows, bool PAIRS>
static inline void lay_out_keys(const char *const *rows, int width, int from, int to,
                                float *columns, Ahead &ahead) {
    const int vectors = (width + (Rows::PAIRED ? 31 : 15)) / (Rows::PAIRED ? 32 : 16);
    const int share = (CHUNK + vectors - 1) / vectors;  // of the rows to fetch
    for (int c = from; c < to; c++)
        each_vector<Rows>(width, [&](int i, auto whole) {
            u32x16 v[CHUNK];
            for (int j = 0; j < CHUNK; j++)
                v[j] = Rows::template lanes<whole.value>(rows[c * CHUNK + j], width, i);
            ahead.fetch(share);
            transpose(v);
            float *at = columns + i * 16 * (Rows::PAIRED && !PAIRS ? 2 : 1) * TILE + c * CHUNK;
            for (int l = 0; l < 16; l++) {
                if constexpr (Rows::PAIRED && !PAIRS) {
                    store(at + 2 * l * TILE, (f32x16)(v[l] << 16));
                    store(at + (2 * l + 1) * TILE, (f32x16)(v[l] & 0xffff0000u));
                } else {
                    store(at + l * TILE, (f32x16)v[l]);
                }
            }
        });
}

// Two rows of 32 bf16, interleaved one by one: their first halves, and their last ones.
#define FIRST32(a, b) LANES(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, \
    40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47)
#define LAST32(a, b) LANES(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, \
    55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63)

// Vector `i` of the values of one step, in the order of the elements: two vectors of 16 where lanes
// hold two elements, else one. A step is a key, or with PAIRS the keys rows[0] and rows[1].
template <class Rows, bool PAIRS, bool WHOLE>
static INLINE void expand(const char *const *rows, int width, int i, f32x16 *out) {
    const u32x16 lanes = Rows::template lanes<WHOLE>(rows[0], width, i);
    if constexpr (PAIRS) {
        const u16x32 a = (u16x32)lanes;
        const u16x32 b = (u16x32)Rows::template lanes<WHOLE>(rows[1], width, i);
        out[0] = (f32x16)FIRST32(a, b), out[1] = (f32x16)LAST32(a, b);
    } else if constexpr (Rows::PAIRED) {
        u16x16 halves[2];
        std::memcpy(halves, &lanes, sizeof lanes);
        out[0] = widen(halves[0]), out[1] = widen(halves[1]);
    } else {
        out[0] = (f32x16)lanes;
    }
}

// The values of keys [from, to): element e of step s goes to values[s * stride + e].
template <class Rows, bool PAIRS>
static inline void lay_out_values(const char *const *rows, int width, int from, int to,
                                  float *values, int stride, Ahead &ahead) {
    constexpr int KEYS = PAIRS ? 2 : 1, VECTORS = Rows::PAIRED ? 2 : 1;
    for (int s = from / KEYS; s * KEYS < to; s++) {
        ahead.fetch(KEYS);
        each_vector<Rows>(width, [&](int i, auto whole) {
            f32x16 out[VECTORS];
            expand<Rows, PAIRS, whole.value>(rows + s * KEYS, width, i, out);
            for (int n = 0; n < VECTORS; n++)
                store(values + s * stride + (i * VECTORS + n) * 16, out[n]);
        });
    }
}

}  // namespace vb::attention
