// Dequantization of rows in 8 or 4 bits: low + scale * number(code) for each group of a row.
//
// `verbatim/kernels/packing.py` describes the layout, and `quantization/rows.py` is the bit-identical torch
// version: the sum is rounded once on every machine, fused or not.
#pragma once

#include <algorithm>

#include "choices.h"
#include "wide.h"

namespace {

using namespace vb;

// ---- codes and group heads ----

// Values of `Encoding` in packing.py.
enum Encoding : int { AFFINE, ZERO_POINT, SIGNED, E4M3, NF4, FP4, MXFP4, HALF, CENTERED = 9 };

// The kinds of codes that kernels are compiled for: integers of 4 or 8 bits, indices of a table of sixteen
// numbers, FP8; or a `Block`.
enum Code : int { BITS4 = 4, BITS8 = 8, TABLE = 20, FP8 = 24 };
constexpr int bits_of(int code) { return code & 15; }
constexpr bool in_blocks(int code) { return block_layout(code).bytes; }
constexpr bool looks_up(int code) {
    return in_blocks(code) ? !block_layout(code).upper.bits && block_layout(code).lower.bits == 4
                           : bits_of(code) == 4;
}
constexpr int bytes_of(int code, int group) {
    return in_blocks(code) ? block_layout(code).bytes : group * bits_of(code) / 8;
}

// The number that a 4-bit code stands for, by encoding; E4M3 has no 4-bit codes.
alignas(64) static const float NUMBERS[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {},
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
     0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
     0.7229568362236023f, 1.0f},
    {0.0f, 0.0052083334885537624f, 0.6666666865348816f, 1.0f, 0.3333333432674408f, 0.5f,
     0.1666666716337204f, 0.25f, -0.0f, -0.0052083334885537624f, -0.6666666865348816f, -1.0f,
     -0.3333333432674408f, -0.5f, -0.1666666716337204f, -0.25f},
    {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
};

static INLINE inline const float *numbers_by_code(int format) {
    const int encoding = format >> 8;
    return NUMBERS[(format & ~255) == NVFP4 ? MXFP4 : encoding > CENTERED ? AFFINE : encoding];
}

// Layout of a row: its codes, then the head of each group. At 4 bits, byte i of a group holds its elements i
// (low half) and i + ceil(size / 2). Or blocks, one after another.
struct RowLayout {
    int bits, encoding, head_bytes;
    int64_t depth, whole, code_bytes, bytes;
    int rest;
    RowLayout(int64_t depth, int format, int group)
        : bits(bits_of(format)), encoding(format >> 8),
          head_bytes(encoding == MXFP4 || encoding == HALF ? 2 : 4), depth(depth), whole(depth / group),
          code_bytes((depth * bits + 7) / 8),
          bytes(code_bytes + (depth + group - 1) / group * head_bytes), rest((int)(depth % group)) {
        const int block = block_layout(format & ~255).bytes;
        if (block) whole = depth / BLOCK, bytes = code_bytes = whole * block, head_bytes = rest = 0;
    }
    const float *numbers() const { return numbers_by_code(encoding << 8); }
};

// FP8 codes are read as half floats, which are 2^8 smaller, so their scales are multiplied by 2^8.
constexpr float FP8_SCALE = 256.0f;

struct Head {
    float scale, low;
};

// Reads the word of a head; a head of two bytes is in its upper half. The product of a zero point and the
// scale is exact. Adding -0 preserves the sign of a zero.
static inline Head head_of(int encoding, int bits, uint32_t word) {
    switch (encoding) {
    case AFFINE:
    case CENTERED: return {float_of(word << 16), float_of(word & 0xffff0000u)};
    case HALF: {
        const float scale = from_half(word >> 16);
        return {scale, -(scale * (float)(1 << (bits - 1)))};
    }
    case ZERO_POINT: {
        const float scale = float_of(word & 0xffffff00u);
        return {scale, -(scale * (float)(word & 0xff))};
    }
    case SIGNED: return {float_of(word), -(float_of(word) * (float)(1 << (bits - 1)))};
    case E4M3: return {float_of(word) * FP8_SCALE, -0.0f};
    default: return {float_of(word), -0.0f};
    }
}

static inline Head head_at(const RowLayout &row, const uint8_t *p) {
    uint32_t word = 0;
    if (row.head_bytes == 4) std::memcpy(&word, p, 4);
    else std::memcpy((char *)&word + 2, p, 2);
    return head_of(row.encoding, row.bits, word);
}

// The heads of sixteen groups.
struct Heads {
    static constexpr int COUNT = 16;
    alignas(64) float scale[COUNT], low[COUNT];

    // Returns whether weights may be computed while subnormals are flushed, and rounded by instructions that
    // flush them. A scale that is 0 or at least 2^-117 and a low that is 0 or at least 2^-126 give no
    // subnormals: no nonzero number is smaller than 2^-9, and sums are zero or a multiple of 2^-125.
    // (Products treat a subnormal weight as zero, too, but numbers just below 2^-126 are rounded up to it.)
    // Half floats are never that small, nor are their products with integers in blocks.
    INLINE inline bool read(const RowLayout &row, const uint8_t *heads, int64_t count) {
        const int there = (int)std::min<int64_t>(COUNT, count);
        const u32x16 words = row.head_bytes == 4
                                 ? load_bits_first<u32x16>(heads, there)
                                 : convert<u32x16>(load_bits_first<u16x16>(heads, there)) << 16;
        f32x16 s = (f32x16)words, l = splat(-0.0f);
        if (row.encoding == AFFINE || row.encoding == CENTERED)
            s = (f32x16)(words << 16), l = (f32x16)(words & 0xffff0000u);
        else if (row.encoding == ZERO_POINT)
            s = (f32x16)(words & 0xffffff00u), l = -(s * convert<f32x16>((i32x16)(words & 255u)));
        if (row.encoding == HALF) s = from_halves(convert<u16x16>(words >> 16));
        if (row.encoding == HALF || row.encoding == SIGNED) l = -(s * (float)(1 << (row.bits - 1)));
        const bool quick = row.encoding == HALF || !(any_below(s, 0x05000000) | any_below(l, 0x00800000));
        if (row.encoding == E4M3) s = s * FP8_SCALE;
        store(scale, roundable(s)), store(low, roundable(l));
        return quick;
    }

  private:
    // Whether a lane is not zero, and smaller in size than the float with these bits.
    static INLINE inline bool any_below(f32x16 v, int32_t bits) {
        const i32x16 size = (i32x16)v & INT32_MAX;
#if defined(__AVX512F__)
        return _mm512_cmplt_epu32_mask((__m512i)(size - 1), _mm512_set1_epi32(bits - 1));
#else
        return any((size > 0) & (size < bits));
#endif
    }
};

// ---- weights in float ----

template <int CODE> static INLINE inline f32x16 numbers_of(u8x16 codes, const float *table) {
    if constexpr (CODE == TABLE) {
#if defined(__AVX512F__)
        const __m512i places = _mm512_cvtepu8_epi32((__m128i)codes);
        return (f32x16)_mm512_permutexvar_ps(places, _mm512_load_ps(table));
#else
        float out[16];
        for (int i = 0; i < 16; i++) out[i] = table[codes[i]];
        return load(out);
#endif
    } else if constexpr (CODE == FP8) {
        return from_fp8(codes);
    } else {
        return to_floats(codes);
    }
}

template <int CODE> static inline float weight_of(const Head &head, int code, const float *table) {
    const float number = CODE == TABLE ? table[code] : CODE == FP8 ? from_fp8((uint8_t)code) : (float)code;
    return (float)((double)head.scale * number + head.low);
}

template <int CODE, int GROUP, typename T>
static INLINE inline void whole_group(T *out, const uint8_t *codes, const Head &head,
                                      const float *table) {
    const auto weights = [&](int at, u8x16 code) INLINE {
        store(out + at, fma(splat(head.scale), numbers_of<CODE>(code, table), splat(head.low)));
    };
    constexpr bool BYTES = bits_of(CODE) == 8;
    for (int i = 0; i < (BYTES ? GROUP : GROUP / 2); i += 16) {
        const u8x16 code = load_codes(codes + i);
        weights(i, BYTES ? code : code & 15);
        if (!BYTES) weights(i + GROUP / 2, code >> 4);
    }
}

template <int CODE, typename T>
static INLINE inline void whole_block(T *out, const uint8_t *block, const BlockHeads<CODE> &heads) {
#pragma GCC unroll 8  // makes the shifts constants
    for (int i = 0; i < BLOCK / 32; i++) {
        const u8x32 codes = block_codes<CODE>(block, i);
        for (int at = 32 * i; at < 32 * i + 32; at += 16) {
            const int group = at / block_layout(CODE).group;
            const u8x16 code = load_codes((const uint8_t *)&codes + at % 32);
            constexpr int KIND = CODE == NVFP4 ? TABLE : BITS4;
            const float middle = (float)block_layout(CODE).middle;
            const f32x16 numbers = numbers_of<KIND>(code, numbers_by_code(CODE)) - middle;
            store(out + at, fma(splat(heads.scale(group)), numbers, splat(heads.low(group))));
        }
    }
}

template <int CODE, typename T>
static __attribute__((noinline)) void short_group(T *out, const uint8_t *codes, int size, const Head &head,
                               const float *table) {
    const int half = (size + 1) / 2;
    for (int i = 0; i < size; i++) {
        const int code = bits_of(CODE) == 8 ? codes[i] : i < half ? codes[i] & 15 : codes[i - half] >> 4;
        put(out + i, weight_of<CODE>(head, code, table));
    }
}

// ---- weights in bf16, a step of 32 at a time ----

// Two sixteens of a step: the first and the last where pairs of bf16 are multiplied, else the odd elements
// and the even ones.
struct Sixteens {
    f32x16 at[2];
};

// The weights of a step: pairs of bf16, or floats that are rounded to bf16.
#if defined(__AVX512BF16__)
typedef __m512bh Weights;
static INLINE inline Weights from_pairs(u32x16 pairs) { return (Weights)pairs; }
static INLINE inline u32x16 to_pairs(Weights weights) { return (u32x16)weights; }
static INLINE inline Weights round_step(const Sixteens &v) { return (Weights)narrow_pairs(v.at[0], v.at[1]); }

// The numbers that a step of codes stands for: integers, or FP8 numbers divided by 2^8.
template <int CODE, bool SIGNED_CODES = false>
static INLINE inline Sixteens numbers_of_step(const uint8_t *at) {
    if constexpr (CODE == FP8) {
        const __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(load_bits<__m256i>(at)), 7);
        const __m512i halves = _mm512_and_si512(words, _mm512_set1_epi16((short)0xbf80));
        return {from_halves((u16x16)_mm512_castsi512_si256(halves)),
                from_halves((u16x16)_mm512_extracti64x4_epi64(halves, 1))};
    }
    const auto numbers = [](__m128i codes) INLINE {
        const __m512i numbers = SIGNED_CODES ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes);
        return (f32x16)_mm512_cvtepi32_ps(numbers);
    };
    return {numbers(load_bits<__m128i>(at)), numbers(load_bits<__m128i>(at + 16))};
}

// A number for each element of a step, given those of its halves.
static INLINE inline Sixteens of_halves(float first, float last) { return {splat(first), splat(last)}; }
#else
typedef Sixteens Weights;
static INLINE inline Weights from_pairs(u32x16 pairs) {
    return {odd_elements(pairs), even_elements(pairs)};
}
static INLINE inline u32x16 to_pairs(const Weights &weights) {
    return (u32x16)weights.at[0] | (u32x16)weights.at[1] >> 16;
}
static INLINE inline Weights round_step(const Sixteens &v) {
    return {odd_elements(round_upper(v.at[0])), odd_elements(round_upper(v.at[1]))};
}

template <int CODE, bool SIGNED_CODES = false>
static INLINE inline Sixteens numbers_of_step(const uint8_t *at) {
    const auto words = load_bits<u16x16>(at);
    if constexpr (CODE == FP8) return {from_upper_fp8(words), from_upper_fp8(words << 8)};
    typedef Vector<int16_t, 16> Signed;
    const auto pairs = convert<i32x16>((std::conditional_t<SIGNED_CODES, Signed, u16x16>)words);
    const i32x16 even = SIGNED_CODES ? pairs << 24 >> 24 : pairs & 255;
    return {convert<f32x16>(pairs >> 8), convert<f32x16>(even)};
}

static INLINE inline Sixteens of_halves(float first, float last) {
    const f32x16 both = select(lane_numbers<i32x16>() < 8, splat(first), splat(last));
    return {both, both};
}
#endif

// A function that returns the weights of a step of group i of `heads`. 4-bit codes stand for `numbers`.
template <int CODE, int GROUP>
static INLINE inline auto weights_by_step(const uint8_t *codes, const Heads &heads, int i, f32x16 numbers) {
    const auto weights = [&heads, i](f32x16 numbers) INLINE {
        return fma(splat(heads.scale[i]), numbers, splat(heads.low[i]));
    };
    if constexpr (bits_of(CODE) == 8) {
        return [=](int step) INLINE {
            const Sixteens v = numbers_of_step<CODE>(codes + 32 * step);
            return round_step({weights(v.at[0]), weights(v.at[1])});
        };
    } else {
        const f32x16 all = weights(numbers);
        return [codes, choices = Choices(all, all)](int step) INLINE {
            return from_pairs(choices.look_up(codes_of_step<GROUP>(codes, step)));
        };
    }
}

// The same for a block.
template <int CODE, int>
static INLINE inline auto weights_by_step(const uint8_t *block, const BlockHeads<CODE> &heads, int,
                                          f32x16 numbers) {
    return [=, &heads](int step) INLINE {
        constexpr BlockLayout L = block_layout(CODE);
        if constexpr (looks_up(CODE) || (CODE == Q5_K && HAS_PAIRS)) {
            const auto weights = [&](int group, f32x16 numbers) INLINE {
                return fma(splat(heads.scale(group)), numbers, splat(heads.low(group)));
            };
            return from_pairs(look_up_in_block<CODE>(block, step, numbers, weights));
        } else {
            const int first = 32 * step / L.group, last = (32 * step + 16) / L.group;
            const u8x32 codes = block_codes<CODE>(block, step) - (uint8_t)L.middle;
            const Sixteens v = numbers_of_step<BITS8, L.middle != 0>((const uint8_t *)&codes);
            const Sixteens scale = of_halves(heads.scale(first), heads.scale(last));
            const Sixteens low = of_halves(heads.low(first), heads.low(last));
            return round_step({fma(scale.at[0], v.at[0], low.at[0]), fma(scale.at[1], v.at[1], low.at[1])});
        }
    };
}

template <int GROUP, typename F> static INLINE inline void store_weights(bf16 *out, F weights) {
#pragma GCC unroll 8
    for (int step = 0; step < GROUP / 32; step++) store_bits(out + 32 * step, to_pairs(weights(step)));
}

template <int CODE, int GROUP, typename T, typename Fetch>
static inline void unpack_groups(T *out, const uint8_t *codes, const RowLayout &row, Fetch fetch) {
    const uint8_t *head = codes + row.code_bytes;
    const float *table = row.numbers();
    Heads heads;
    for (int64_t g = 0; g < row.whole; g += Heads::COUNT, head += Heads::COUNT * row.head_bytes) {
        const int count = (int)std::min<int64_t>(Heads::COUNT, row.whole - g);
        const bool quick = heads.read(row, head, count);
        for (int i = 0; i < count; i++, codes += GROUP * bits_of(CODE) / 8, out += GROUP) {
            fetch(g + i);
            if constexpr (sizeof(T) == 2) {
                if (quick) {
                    store_weights<GROUP>(out, weights_by_step<CODE, GROUP>(codes, heads, i, load(table)));
                    continue;
                }
            }
            whole_group<CODE, GROUP>(out, codes, Head{heads.scale[i], heads.low[i]}, table);
        }
    }
    if (!row.rest) return;
    head = codes - row.whole * GROUP * bits_of(CODE) / 8 + row.code_bytes;
    short_group<CODE>(out, codes, row.rest, head_at(row, head + row.whole * row.head_bytes), table);
}

template <int CODE, typename T, typename Fetch>
static inline void unpack_blocks(T *out, const uint8_t *block, const RowLayout &row, Fetch fetch) {
    for (int64_t g = 0; g < row.whole; g++, block += block_layout(CODE).bytes, out += BLOCK) {
        fetch(g);
        BlockHeads<CODE> heads;
        const bool quick = heads.read(block);
        if constexpr (sizeof(T) == 2) {
            if (quick) {
                store_weights<BLOCK>(out, weights_by_step<CODE, BLOCK>(block, heads, 0, load(row.numbers())));
                continue;
            }
        }
        whole_block(out, block, heads);
    }
}

// Dequantizes one row of `depth` numbers. Calls `fetch(i)` for each group, for prefetching.
template <int CODE, int GROUP, typename T, typename Fetch>
static inline void unpack_row(T *out, const uint8_t *codes, const RowLayout &row, Fetch fetch) {
    if constexpr (in_blocks(CODE)) unpack_blocks<CODE>(out, codes, row, fetch);
    else unpack_groups<CODE, GROUP>(out, codes, row, fetch);
}

// Calls f(code) with the kind of codes as a constant, for formats without blocks.
template <typename F> static inline void of_code(int format, F f) {
    const int encoding = format >> 8;
    if (encoding == E4M3) f(std::integral_constant<int, FP8>());
    else if ((encoding > E4M3 && encoding <= MXFP4) || encoding == CENTERED)
        f(std::integral_constant<int, TABLE>());
    else if (bits_of(format) == 8) f(std::integral_constant<int, BITS8>());
    else f(std::integral_constant<int, BITS4>());
}

// Calls f(code, group) with both as constants.
template <typename F> static inline void of_kind(int format, int group, F f) {
    const auto block = [&](auto code) { f(code, std::integral_constant<int, BLOCK>()); };
    switch (format & ~255) {
    case Q2_K: return block(std::integral_constant<int, Q2_K>());
    case Q3_K: return block(std::integral_constant<int, Q3_K>());
    case Q4_K: return block(std::integral_constant<int, Q4_K>());
    case Q5_K: return block(std::integral_constant<int, Q5_K>());
    case Q6_K: return block(std::integral_constant<int, Q6_K>());
    case NVFP4: return block(std::integral_constant<int, NVFP4>());
    }
    of_code(format, [&](auto code) {
        if (group == 32) f(code, std::integral_constant<int, 32>());
        else if (group == 64) f(code, std::integral_constant<int, 64>());
        else f(code, std::integral_constant<int, 128>());
    });
}

}  // namespace
