// Rows in 8 or 4 bits, made numbers again: low + scale * code for each group of a row.
//
// `verbatim/model/quantize.py` tells how they lie, and `groups.py` says the same in torch, bit for
// bit: the product is exact in a float (8 bits times 8), so the sum is rounded once whether it is fused or not.
#pragma once

#include <algorithm>

#include "simd.h"

#define INLINE __attribute__((always_inline))

namespace {

using namespace vb;

static inline u8x16 load_codes(const uint8_t *p) {
    u8x16 codes;
    std::memcpy(&codes, p, sizeof codes);
    return codes;
}

// Numbers alone come here, so a NaN needs no care.
static inline u16x16 narrow_number(f32x16 v) {
    const u32x16 bits = (u32x16)v, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
#if defined(__AVX512F__)
    return (u16x16)_mm512_cvtepi32_epi16((__m512i)(rounded >> 16));
#else
    return __builtin_convertvector(rounded >> 16, u16x16);
#endif
}

static inline void put_all(float *p, f32x16 v) { store(p, v); }
static inline void put_all(bf16 *p, f32x16 v) {
    const u16x16 bits = narrow_number(v);
    std::memcpy(p, &bits, sizeof bits);
}

static inline float bf16_at(const uint8_t *p) {
    bf16 x;
    std::memcpy(&x, p, sizeof x);
    return to_float(x);
}

// How a row lies: its codes, then (scale, low) of each group. In 4 bits, byte i of a group holds its
// elements i (low half) and i + ceil(size / 2).
struct RowLayout {
    int64_t depth, whole, code_bytes, bytes;
    int rest;
    RowLayout(int64_t depth, int bits, int group)
        : depth(depth), whole(depth / group), code_bytes((depth * bits + 7) / 8),
          bytes(code_bytes + (depth + group - 1) / group * 4), rest((int)(depth % group)) {}
};

template <int BITS, int GROUP, typename T>
static INLINE inline void whole_group(T *out, const uint8_t *codes, const uint8_t *head) {
    const f32x16 s = splat(bf16_at(head)), l = splat(bf16_at(head + 2));
    if (BITS == 8) {
        for (int i = 0; i < GROUP; i += 16)
            put_all(out + i, fma(s, to_floats(load_codes(codes + i)), l));
    } else {
        for (int i = 0; i < GROUP / 2; i += 16) {
            const u8x16 both = load_codes(codes + i);
            put_all(out + i, fma(s, to_floats(both & 15), l));
            put_all(out + i + GROUP / 2, fma(s, to_floats(both >> 4), l));
        }
    }
}

template <int BITS, typename T>
static inline void short_group(T *out, const uint8_t *codes, int size, const uint8_t *head) {
    const float scale = bf16_at(head), low = bf16_at(head + 2);
    const int half = (size + 1) / 2;
    for (int i = 0; i < size; i++) {
        const int code = BITS == 8 ? codes[i] : i < half ? codes[i] & 15 : codes[i - half] >> 4;
        put(out + i, low + scale * (float)code);
    }
}

#if defined(__AVX512BF16__)

// The instructions that round to bf16 take a denormal number for zero. None can come of heads whose
// scale is 0 or at least 2^-117 and whose low is 0 or at least 2^-126: code 0 gives low itself, and
// any other sum is zero or a multiple of 2^-125. (The products take a denormal weight for zero too,
// but the numbers just below 2^-126 are rounded up to it.)
static inline bool rounds_quickly(const uint8_t *heads, int64_t groups) {
    const __m512i limits = _mm512_set1_epi32(0x007f04ff);  // less one: zero becomes the largest
    const __m512i one = _mm512_set1_epi16(1), magnitude = _mm512_set1_epi16(0x7fff);
    __mmask32 slow = 0;
    for (int64_t g = 0; g < groups; g += 16) {
        const __mmask16 left = (__mmask16)((1u << std::min<int64_t>(16, groups - g)) - 1);
        const __m512i head = _mm512_maskz_loadu_epi32(left, heads + g * 4);
        const __m512i low = _mm512_sub_epi16(_mm512_and_si512(head, magnitude), one);
        slow |= _mm512_cmplt_epu16_mask(low, limits);
    }
    return !slow;
}

// A group's scale and low, in every lane.
struct Head {
    __m512 scale, low;
    static INLINE inline Head at(const uint8_t *head) {
        int32_t both;
        std::memcpy(&both, head, 4);
        return of(_mm512_set1_epi32(both));
    }
    static INLINE inline Head of(__m512i both) {
        return {(__m512)_mm512_slli_epi32(both, 16),
                (__m512)_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000))};
    }
};

// The heads of sixteen groups as floats, so that each takes but two loads.
struct Heads {
    static constexpr int COUNT = 16;
    alignas(64) float scale[COUNT], low[COUNT];
    INLINE inline void read(const uint8_t *heads, int64_t count) {
        const __mmask16 there = (__mmask16)((1u << std::min<int64_t>(COUNT, count)) - 1);
        const Head all = Head::of(_mm512_maskz_loadu_epi32(there, heads));
        _mm512_store_ps(scale, all.scale);
        _mm512_store_ps(low, all.low);
    }
    INLINE inline Head operator[](int i) const {
        return {_mm512_set1_ps(scale[i]), _mm512_set1_ps(low[i])};
    }
};

// A group's weights, in steps of 32 along K.
template <int BITS, int GROUP> struct Group;

template <int GROUP> struct Group<8, GROUP> {
    const uint8_t *codes;
    Head head;
    Group() = default;
    INLINE inline Group(const uint8_t *codes, const Head &head) : codes(codes), head(head) {}
    INLINE inline __m512 sixteen(int i) const {
        const __m128i code = _mm_loadu_si128((const __m128i *)(codes + i));
        const __m512 number = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(code));
        return _mm512_fmadd_ps(head.scale, number, head.low);
    }
    INLINE inline __m512bh step(int i) const {
        return _mm512_cvtne2ps_pbh(sixteen(32 * i + 16), sixteen(32 * i));
    }
};

// The sixteen numbers that there are, found by their codes. They are there twice, so that the bit
// above a code may be anything.
template <int GROUP> struct Group<4, GROUP> {
    const uint8_t *codes;
    __m512i numbers;
    Group() = default;
    INLINE inline Group(const uint8_t *codes, const Head &head) : codes(codes) {
        const __m512 all = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512 values = _mm512_fmadd_ps(head.scale, all, head.low);
        numbers = (__m512i)_mm512_cvtne2ps_pbh(values, values);
    }
    INLINE inline __m512bh step(int i) const {
        constexpr int STEPS = GROUP / 64;
        __m512i words;
        if (GROUP == 32) {  // one step: the sixteen bytes twice, the second time shifted
            const __m128i code = _mm_loadu_si128((const __m128i *)codes);
            words = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(code));
            words = _mm512_mask_srli_epi16(words, 0xffff0000, words, 4);
        } else {
            const uint8_t *at = codes + 32 * (i < STEPS ? i : i - STEPS);
            words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)at));
            if (i >= STEPS) words = _mm512_srli_epi16(words, 4);
        }
        return (__m512bh)_mm512_permutexvar_epi16(words, numbers);
    }
};

template <int BITS, int GROUP>
static INLINE inline void quick_group(bf16 *out, const uint8_t *codes, const uint8_t *head) {
    const Group<BITS, GROUP> group(codes, Head::at(head));
    for (int i = 0; i < GROUP / 32; i++)
        _mm512_storeu_si512(out + 32 * i, (__m512i)group.step(i));
}
#else
static inline bool rounds_quickly(const uint8_t *, int64_t) { return false; }
template <int BITS, int GROUP>
static inline void quick_group(bf16 *, const uint8_t *, const uint8_t *) {}
#endif
template <int BITS, int GROUP>
static inline void quick_group(float *, const uint8_t *, const uint8_t *) {}

// One row, `depth` numbers. `fetch(i)` is called for each group, to bring something into the cache.
template <int BITS, int GROUP, typename T, typename Fetch>
static inline void unpack_row(T *out, const uint8_t *codes, const RowLayout &row, Fetch fetch) {
    const uint8_t *head = codes + row.code_bytes;
    if (sizeof(T) == 2 && rounds_quickly(head, row.whole)) {
        for (int64_t g = 0; g < row.whole; g++, codes += GROUP * BITS / 8, head += 4, out += GROUP)
            fetch(g), quick_group<BITS, GROUP>(out, codes, head);
    } else {
        for (int64_t g = 0; g < row.whole; g++, codes += GROUP * BITS / 8, head += 4, out += GROUP)
            fetch(g), whole_group<BITS, GROUP>(out, codes, head);
    }
    if (row.rest) short_group<BITS>(out, codes, row.rest, head);
}

constexpr int64_t STRIP = 512;  // columns whose heads stay in the first cache

// Columns `begin` to `end`, at most STRIP of them, of a group of `size` rows of w[depth, cols]: its
// scales, lows, then codes. `out_stride` is from row to row.
template <int BITS, typename T>
static void unpack_columns(T *out, int64_t out_stride, const uint8_t *group, int size, int64_t cols,
                           int64_t begin, int64_t end) {
    const uint8_t *scales = group + begin * 2, *lows = scales + cols * 2;
    const uint8_t *codes = group + cols * 4;
    const int half = (size + 1) / 2;
    const int64_t width = end - begin;
    float s[STRIP], l[STRIP];
    for (int64_t c = 0; c < width; c++)
        s[c] = bf16_at(scales + c * 2), l[c] = bf16_at(lows + c * 2);
    for (int i = 0; i < size; i++) {
        const bool upper = BITS == 4 && i >= half;
        const uint8_t *from = codes + (upper ? i - half : i) * cols + begin;
        T *to = out + i * out_stride;
        int64_t c = 0;
        for (; c + 16 <= width; c += 16) {
            u8x16 code = load_codes(from + c);
            if (BITS == 4) code = upper ? code >> 4 : code & 15;
            put_all(to + c, fma(load(s + c), to_floats(code), load(l + c)));
        }
        for (; c < width; c++) {
            const int code = BITS == 8 ? from[c] : upper ? from[c] >> 4 : from[c] & 15;
            put(to + c, l[c] + s[c] * (float)code);
        }
    }
}

// f(bits, group), both as constants.
template <typename F> static inline void of_kind(int bits, int group, F f) {
    const auto sized = [&](auto b) {
        if (group == 32) f(b, std::integral_constant<int, 32>());
        else if (group == 64) f(b, std::integral_constant<int, 64>());
        else f(b, std::integral_constant<int, 128>());
    };
    if (bits == 8) sized(std::integral_constant<int, 8>());
    else sized(std::integral_constant<int, 4>());
}

}  // namespace
