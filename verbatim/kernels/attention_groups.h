// Rows of keys and values in few bits: 8 in groups of 64 elements, or 4 in groups of 32.
//
// A row is one token's vector of one KV head: its codes, then for each group (scale, low), two
// bf16. An element is low + scale * code, with codes from 0 to 2^BITS - 1. A group never leaves its
// row, so what is held for a token depends on nothing but that token. The product is exact in a
// float (8 bits times 8), so an element has one rounding and the same bits on every instruction
// set. At 4 bits byte i of a group holds element i (low half) and element i + ceil(group / 2); only
// the last group may be short. `verbatim/kv/quantized.py` says the same in torch, bit for bit.
#pragma once

#include "attention_tile.h"

#include <cmath>

namespace vb::attention {

typedef uint8_t u8x16 __attribute__((vector_size(16)));

template <int BITS> constexpr int GROUP = BITS == 8 ? 64 : 32;

template <int BITS> static inline int code_bytes(int width) { return (width * BITS + 7) / 8; }

template <int BITS> static inline int row_bytes(int width) {
    return code_bytes<BITS>(width) + (width + GROUP<BITS> - 1) / GROUP<BITS> * 4;
}

static inline f32x16 to_floats(u8x16 codes) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)codes));
#else  // in steps of twice the width: gcc takes a longer one apart, byte by byte
    const u16x16 wide = __builtin_convertvector(codes, u16x16);
    return __builtin_convertvector(__builtin_convertvector(wide, i32x16), f32x16);
#endif
}

template <int BITS> static INLINE void unpack_row(const uint8_t *row, int width, float *to) {
    constexpr int STEP = 32;  // elements at a time: a group of 4 bits, half of one of 8
    const uint8_t *heads = row + code_bytes<BITS>(width);
    for (int e = 0; e < width; e += STEP, row += STEP * BITS / 8) {
        bf16 head[2];
        std::memcpy(head, heads + e / GROUP<BITS> * 4, sizeof head);
        const float scale = to_float(head[0]), low = to_float(head[1]);
        if (e + STEP > width) {
            const int n = width - e, half = (n + 1) / 2;
            for (int i = 0; i < n; i++) {
                const int code = BITS == 8 ? row[i] : i < half ? row[i] & 15 : row[i - half] >> 4;
                to[e + i] = low + scale * (float)code;
            }
            return;
        }
        u8x16 first, last;
        std::memcpy(&first, row, sizeof first);
        if (BITS == 8) std::memcpy(&last, row + 16, sizeof last);
        else last = first >> 4, first &= 15;
        store(to + e, fma(splat(scale), to_floats(first), splat(low)));
        store(to + e + 16, fma(splat(scale), to_floats(last), splat(low)));
    }
}

// Rows `at` and following to lines of `stride` floats, while rows `ahead` and following are fetched.
template <int BITS>
static inline void unpack_rows(const uint8_t *rows, int64_t at, int64_t ahead, int n, int width,
                               float *to, int stride) {
    const int bytes = row_bytes<BITS>(width);
    const uint8_t *row = rows + at * bytes, *next = rows + ahead * bytes;
    for (int i = 0; i < n; i++, row += bytes, next += bytes, to += stride) {
        for (int b = 0; b < bytes; b += 64) __builtin_prefetch(next + b);
        unpack_row<BITS>(row, width, to);
    }
}

// To a bf16 that is not nearer to zero, and to one that is not above.
static inline bf16 round_away(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (bf16)((bits + 0xffffu) >> 16);
}

static inline bf16 round_down(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? round_away(x) : (bf16)(bits >> 16);
}

// Scale and low are rounded outwards, so that low <= x <= low + scale * (2^BITS - 1) and no element
// is more than half a step off. A group that holds a NaN or an infinity is NaN throughout.
template <int BITS, class T> static inline void pack_row(const T *x, int width, uint8_t *row) {
    constexpr float LEVELS = (1 << BITS) - 1;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    uint8_t *heads = row + code_bytes<BITS>(width);
    for (int e = 0; e < width; e += GROUP<BITS>, heads += 4) {
        const int n = width - e < GROUP<BITS> ? width - e : GROUP<BITS>;
        float group[GROUP<BITS>], low = INFINITY, high = -INFINITY;
        bool finite = true;
        for (int i = 0; i < n; i++) {
            group[i] = to_float(x[e + i]);
            finite &= group[i] - group[i] == 0;
            low = group[i] < low ? group[i] : low;
            high = group[i] > high ? group[i] : high;
        }
        bf16 head[2] = {0x7fc0, 0x7fc0};
        const bf16 rounded_low = round_down(low + 0.0f);  // -0 becomes 0
        low = to_float(rounded_low);
        const float step = (high - low) / LEVELS;
        float scale = 0;
        if (finite && step - step == 0) {
            head[0] = round_away(step), head[1] = rounded_low;
            scale = to_float(head[0]);
        }
        std::memcpy(heads, head, sizeof head);
        uint8_t codes[GROUP<BITS>] = {};
        if (scale > 0)
            for (int i = 0; i < n; i++) {
                const float code = ((group[i] - low) / scale + shift) - shift;
                codes[i] = (uint8_t)(int)(code > LEVELS ? LEVELS : code);
            }
        const int half = (n + 1) / 2;
        if (BITS == 8) std::memcpy(row, codes, n);
        else
            for (int i = 0; i < half; i++)
                row[i] = codes[i] | (i + half < n ? codes[i + half] << 4 : 0);
        row += BITS == 8 ? n : half;
    }
}

}  // namespace vb::attention
