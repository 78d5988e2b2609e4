// Stored rows of keys and values, and the layout of a tile of them for the arithmetic.
//
// Rows are read as vectors of 32-bit lanes: 16 floats, or 16 pairs of neighbouring bf16. A tile's keys are
// joined in pairs and its values interleaved once, and then used by all lines that see the tile
// (attention_tile.h). The only computation here is dequantization.
#pragma once

#include "wide.h"

#include <algorithm>

namespace vb::attention {

constexpr int TILE = 64;  // keys of a tile, between two rescalings; tiles begin at multiples of this

// ---- Formats of stored rows ----

// Vector `i` of the lanes of a row. Only the last vector may be partial (not WHOLE); it is padded with zeros.
template <bool WHOLE> static INLINE inline f32x16 load_lanes(const char *row, int bytes, int i) {
    if (WHOLE) return load_bits<f32x16>(row + 64 * i);
    char lanes[64] = {};
    std::memcpy(lanes, row + 64 * i, bytes - 64 * i);
    return load_bits<f32x16>(lanes);
}

struct FloatRows {
    static constexpr bool PAIRED = false;
    static int bytes(int width) { return width * 4; }
    template <bool WHOLE> static INLINE inline f32x16 lanes(const char *row, int width, int i) {
        return load_lanes<WHOLE>(row, width * 4, i);
    }
};

struct HalfRows {
    static constexpr bool PAIRED = true;
    static int bytes(int width) { return width * 2; }
    template <bool WHOLE> static INLINE inline f32x16 lanes(const char *row, int width, int i) {
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
static INLINE inline void each_vector(int width, const Function &f) {
    constexpr int ELEMENTS = Rows::PAIRED ? 32 : 16;
    for (int i = 0; i < width / ELEMENTS; i++) f(i, Whole());
    if (!EXACT && width % ELEMENTS) f(width / ELEMENTS, Partial());
}

// ---- Prefetching ----

constexpr int AHEAD = 40;  // rows between the one in use and the one that is prefetched

// Prefetches vector `i` of the row AHEAD of rows[0]. A core can wait for a limited number of cache lines, so
// they are requested one by one, one per vector in use: many at once would stall the arithmetic and then
// leave the memory idle. A longer distance would evict data in use.
template <class Rows> static INLINE inline void fetch(const char *const *rows, int width, int i) {
    constexpr int ELEMENTS = Rows::PAIRED ? 32 : 16;
    const int vectors = (width + ELEMENTS - 1) / ELEMENTS;
    prefetch<false>(rows[AHEAD] + i * ((Rows::bytes(width) + vectors - 1) / vectors));
}

// Prefetches a whole row.
static INLINE inline void fetch_row(const char *row, int bytes) {
    for (int b = 0; b < bytes; b += 64) prefetch<false>(row + b);
}

// ---- Layout of a tile ----

// Vector `i` of the values of one step, in element order: two vectors of 16 if lanes hold two elements, else
// one. A step is one key, or with PAIRS the keys rows[0] and rows[1].
template <class Rows, bool PAIRS, bool WHOLE>
static INLINE inline void expand(const char *const *rows, int width, int i, f32x16 *out) {
    const f32x16 lanes = Rows::template lanes<WHOLE>(rows[0], width, i);
    if constexpr (PAIRS) {
        const f32x16 next = Rows::template lanes<WHOLE>(rows[1], width, i);
        out[0] = zip<bf16, false>(lanes, next), out[1] = zip<bf16, true>(lanes, next);
    } else if constexpr (Rows::PAIRED) {
        bf16 elements[32];
        store_bits(elements, lanes);
        out[0] = load((const bf16 *)elements), out[1] = load((const bf16 *)elements + 16);
    } else {
        out[0] = lanes;
    }
}

// Vector `i` of the keys rows[0] and rows[1] with interleaved lanes, so that one instruction multiplies both:
// four vectors if each key takes two, else two.
template <class Rows, bool PAIRS, bool WHOLE>
static INLINE inline void join(const char *const *rows, int width, int i, f32x16 *out) {
    constexpr int M = Rows::PAIRED && !PAIRS ? 2 : 1;
    f32x16 a[M], b[M];
    if constexpr (PAIRS) {
        a[0] = Rows::template lanes<WHOLE>(rows[0], width, i);
        b[0] = Rows::template lanes<WHOLE>(rows[1], width, i);
    } else {
        expand<Rows, false, WHOLE>(rows, width, i, a);
        expand<Rows, false, WHOLE>(rows + 1, width, i, b);
    }
    for (int m = 0; m < M; m++)
        out[2 * m] = zip<float, false>(a[m], b[m]), out[2 * m + 1] = zip<float, true>(a[m], b[m]);
}

// Stores vector `i` of a line, or with WIDE the two vectors of floats of its pairs, `apart` floats apart.
template <bool WIDE> static INLINE inline void put(float *line, int i, int apart, f32x16 v) {
    if constexpr (WIDE) {
        store(line + i * 2 * apart, odd_elements((u32x16)v));
        store(line + i * 2 * apart + apart, even_elements((u32x16)v));
    } else {
        store(line + i * apart, v);
    }
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
