// Quantized rows of keys and values: 8 bits in groups of 64 elements, or 4 bits in groups of 32.
//
// A row is one token's vector of one KV head: its codes, then (scale, low) of each group, two bf16. An
// element is low + scale * code, with codes from 0 to 2^BITS - 1. Groups don't span rows, so the bytes stored
// for a token depend on that token only. The product is exact in a float (8 bits times 8), so an element is
// rounded once and has the same bits on every instruction set. At 4 bits, byte i of a group holds element i
// (low half) and element i + ceil(group / 2); only the last group may be short.
// `verbatim/quantization/rows.py` is the bit-identical torch version.
#pragma once

#include "attention_rows.h"

#include <cmath>

namespace vb::attention {

typedef uint16_t u16x32 __attribute__((vector_size(64)));

template <int BITS> constexpr int GROUP = BITS == 8 ? 64 : 32;

template <int BITS> static inline int code_bytes(int width) { return (width * BITS + 7) / 8; }

template <int BITS> static inline int row_bytes(int width) {
    return code_bytes<BITS>(width) + (width + GROUP<BITS> - 1) / GROUP<BITS> * 4;
}

// Quantized rows, read as floats, or with HALF rounded to bf16.
template <int BITS, bool HALF> struct PackedRows {
    static constexpr bool PAIRED = HALF;
    static int bytes(int width) { return row_bytes<BITS>(width); }

    template <bool WHOLE> static INLINE inline f32x16 lanes(const char *row, int width, int i) {
#if defined(__AVX512BF16__)
        if constexpr (HALF && BITS == 4 && WHOLE) return (f32x16)look_up((const uint8_t *)row, width, i);
#endif
        if constexpr (HALF) {
            f32x16 x[2];
            unpack<0, 2, WHOLE>((const uint8_t *)row, width, i * 32, x);
            return (f32x16)narrow_pairs(x[0], x[1]);
        } else {
            f32x16 x;
            if (i % 2 == 0) unpack<0, 1, false>((const uint8_t *)row, width, i * 16, &x);
            else unpack<1, 1, false>((const uint8_t *)row, width, (i - 1) * 16, &x);
            return x;
        }
    }

  private:
#if defined(__AVX512BF16__)
    // Group `i` at 4 bits: its 16 possible values are computed once, and looked up by code.
    static INLINE inline u32x16 look_up(const uint8_t *row, int width, int i) {
        uint32_t word;
        std::memcpy(&word, row + code_bytes<4>(width) + i * 4, sizeof word);
        const u32x16 head = spread<u32x16>(word);
        const f32x16 low = odd_elements(head), scale = even_elements(head);
        const __m256i elements = (__m256i)_mm512_cvtneps_pbh((__m512)fma(scale, lane_numbers<f32x16>(), low));
        __m128i bytes;
        std::memcpy(&bytes, row + i * 16, sizeof bytes);
        const u16x32 both = (u16x32)_mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(bytes));
        const u16x32 shifts = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                               4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};
        return (u32x16)_mm512_permutexvar_epi16((__m512i)((both >> shifts) & 15),
                                                _mm512_castsi256_si512(elements));
    }
#endif

    // Dequantizes the first 16, the last 16 or both of the 32 elements from `e` on.
    template <int FIRST, int COUNT, bool WHOLE>
    static INLINE inline void unpack(const uint8_t *row, int width, int e, f32x16 *out) {
        const uint8_t *codes = row + e * BITS / 8;
        uint32_t word;
        std::memcpy(&word, row + code_bytes<BITS>(width) + e / GROUP<BITS> * 4, sizeof word);
        const u32x16 head = spread<u32x16>(word);
        const f32x16 low = odd_elements(head), scale = even_elements(head);
        uint8_t last_codes[32];
        if (!WHOLE && e + 32 > width) {  // the last group is short: lay it out as a whole one
            const int n = width - e, half = (n + 1) / 2;
            uint8_t all[32] = {};
            for (int k = 0; k < n; k++)
                all[k] = BITS == 8 ? codes[k] : k < half ? codes[k] & 15 : codes[k - half] >> 4;
            for (int k = 0; k < 32; k++)
                last_codes[k] = BITS == 8 ? all[k] : k < 16 ? all[k] | all[k + 16] << 4 : 0;
            codes = last_codes;
        }
        for (int part = FIRST; part < FIRST + COUNT; part++) {
            u8x16 x;
            std::memcpy(&x, codes + (BITS == 8 ? 16 * part : 0), sizeof x);
            if (BITS == 4) x = part == 0 ? x & 15 : x >> 4;
            out[part - FIRST] = fma(scale, to_floats(x), low);
        }
        if (!WHOLE)
            for (int part = FIRST; part < FIRST + COUNT; part++)
                out[part - FIRST] = first_lanes(out[part - FIRST], width - e - 16 * part);
    }

    static INLINE inline f32x16 first_lanes(f32x16 x, int n) {  // zeroes the others
        return select(lane_numbers<i32x16>() < n, x, splat(0.0f));
    }
};

// Round to a bf16, away from zero, or down.
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

// Quantizes a row. Scale and low are rounded outwards, so that low <= x <= low + scale * (2^BITS - 1), and no
// element is more than half a step off. A group with a NaN or an infinity becomes NaN throughout.
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
        const bf16 rounded_low = round_down(stored_low(low + 0.0f));  // -0 becomes 0
        low = to_float(rounded_low);
        const float step = stored_scale((high - low) / LEVELS + 0.0f);
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
