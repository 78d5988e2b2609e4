// Dequantization of rows in 8 or 4 bits: low + scale * number(code) for each group of a row.
//
// `verbatim/kernels/packing.py` describes the layout, and `quantization/rows.py` is the bit-identical torch
// version: the sum is rounded once on every machine, fused or not.
#pragma once

#include <algorithm>

#include "blocks.h"

namespace {

using namespace vb;

static inline u8x16 load_codes(const uint8_t *p) { return load_bits<u8x16>(p); }

// ---- codes and group heads ----

// Values of `Encoding` in packing.py.
enum Encoding : int { AFFINE, ZERO_POINT, SIGNED, E4M3, NF4, FP4, MXFP4, HALF, CENTERED = 9 };

// The kinds of codes that kernels are compiled for: integers of 4 or 8 bits, indices of a table of sixteen
// numbers, FP8; or a `Block`.
enum Code : int { BITS4 = 4, BITS8 = 8, TABLE = 20, FP8 = 24 };
constexpr int bits_of(int code) { return code & 15; }
constexpr bool in_blocks(int code) { return block_layout(code).bytes; }
constexpr bool in_pairs(int code) { return code == Q4_K || code == NVFP4; }
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
          head_bytes(encoding == MXFP4 || encoding == HALF ? 2 : 4), depth(depth), whole(depth / group), code_bytes((depth * bits + 7) / 8),
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
#if defined(__AVX512BF16__)
    // Returns whether the instructions that round to bf16 give the right bits: they treat denormals as zero.
    // A scale that is 0 or at least 2^-117 and a low that is 0 or at least 2^-126 give no denormals: no
    // nonzero number is smaller than 2^-9, and sums are zero or a multiple of 2^-125. (Products treat a
    // denormal weight as zero, too, but numbers just below 2^-126 are rounded up to it.) Half floats are
    // never that small, nor are their products with integers in blocks.
    INLINE inline bool read(const RowLayout &row, const uint8_t *heads, int64_t count) {
        const __mmask16 there = (__mmask16)((1u << std::min<int64_t>(COUNT, count)) - 1);
        // One is subtracted from what is compared with a limit, so that zero becomes the largest.
        if (row.encoding == AFFINE || row.encoding == CENTERED) {
            const __m512i words = _mm512_maskz_loadu_epi32(there, heads);
            _mm512_store_epi32(scale, _mm512_slli_epi32(words, 16));
            _mm512_store_epi32(low, _mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
            const __m512i sizes = _mm512_and_si512(words, _mm512_set1_epi16(0x7fff));
            const __m512i limits = _mm512_set1_epi32((0x0080 - 1) << 16 | (0x0500 - 1));
            return !_mm512_cmplt_epu16_mask(_mm512_sub_epi16(sizes, _mm512_set1_epi16(1)), limits);
        }
        __m512i words;
        if (row.head_bytes == 4) words = _mm512_maskz_loadu_epi32(there, heads);
        else
            words = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, heads)), 16);
        __m512 s = (__m512)words, l = _mm512_set1_ps(-0.0f);
        switch (row.encoding) {
        case ZERO_POINT: {
            const __m512i mask = _mm512_set1_epi32(0xff);
            s = (__m512)_mm512_andnot_si512(mask, words);
            l = _mm512_fnmadd_ps(s, _mm512_cvtepi32_ps(_mm512_and_si512(words, mask)), l);
            break;
        }
        case HALF:
            s = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
            [[fallthrough]];
        case SIGNED: l = _mm512_fnmadd_ps(s, _mm512_set1_ps((float)(1 << (row.bits - 1))), l); break;
        }
        const auto below = [](__m512 v, int bits) {
            const __m512i size = _mm512_and_si512((__m512i)v, _mm512_set1_epi32(0x7fffffff));
            const __m512i one = _mm512_set1_epi32(1);
            return _mm512_cmplt_epu32_mask(_mm512_sub_epi32(size, one), _mm512_set1_epi32(bits - 1));
        };
        const bool quick = row.encoding == HALF ||
                           !(below(s, 0x05000000) | below(l, 0x00800000));
        if (row.encoding == E4M3) s = _mm512_mul_ps(s, _mm512_set1_ps(FP8_SCALE));
        _mm512_store_ps(scale, s);
        _mm512_store_ps(low, l);
        return quick;
    }
#else
    inline bool read(const RowLayout &row, const uint8_t *heads, int64_t count) {
        for (int i = 0; i < std::min<int64_t>(COUNT, count); i++) {
            const Head head = head_at(row, heads + i * row.head_bytes);
            scale[i] = head.scale, low[i] = head.low;
        }
        return false;
    }
#endif
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

// The sixteen weights that 4-bit codes may stand for, in bf16. `put` stores those of sixteen codes.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr bool LOOKS_UP = true;
class Choices {
    __m256i words;

  public:
    explicit INLINE inline Choices(f32x16 weights) : words((__m256i)narrow(weights)) {}
    INLINE inline void put(bf16 *out, u8x16 codes) const {
        const __m256i at = _mm256_cvtepu8_epi16((__m128i)codes);
        _mm256_storeu_si256((__m256i *)out, _mm256_permutexvar_epi16(at, words));
    }
};
#else  // in two tables of bytes, which one instruction looks up
#if defined(__SSSE3__)
constexpr bool LOOKS_UP = true;
static INLINE inline u8x16 look_up(u8x16 table, u8x16 at) {
    return (u8x16)_mm_shuffle_epi8((__m128i)table, (__m128i)at);
}
#elif defined(__aarch64__)
constexpr bool LOOKS_UP = true;
static INLINE inline u8x16 look_up(u8x16 table, u8x16 at) {
    return (u8x16)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)at);
}
#else
constexpr bool LOOKS_UP = false;
static INLINE inline u8x16 look_up(u8x16 table, u8x16) { return table; }
#endif
class Choices {
    u8x16 lower, upper;

  public:
    explicit INLINE inline Choices(f32x16 weights) {
        bf16 all[16];
        store(all, weights);
        const auto a = load_bits<u8x16>(all), b = load_bits<u8x16>(all + 8);
        lower = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        upper = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    }
    INLINE inline void put(bf16 *out, u8x16 codes) const {
        const u8x16 low = look_up(lower, codes), high = look_up(upper, codes);
        store_bits(out, zip<uint8_t, false>(low, high)), store_bits(out + 8, zip<uint8_t, true>(low, high));
    }
};
#endif

template <int CODE, int GROUP, typename T>
static INLINE inline void whole_group(T *out, const uint8_t *codes, const Head &head,
                                      const float *table) {
    const f32x16 s = splat(head.scale), l = splat(head.low);
    const auto each_sixteen = [&](auto f) INLINE {  // f(place, codes) for 4-bit codes
        for (int i = 0; i < GROUP / 2; i += 16) {
            const u8x16 both = load_codes(codes + i);
            f(i, both & 15), f(i + GROUP / 2, both >> 4);
        }
    };
    const auto compute = [&](int at, u8x16 code) INLINE {
        store(out + at, fma(s, numbers_of<CODE>(code, table), l));
    };
    if constexpr (bits_of(CODE) == 8) {
        for (int i = 0; i < GROUP; i += 16) compute(i, load_codes(codes + i));
    } else if constexpr (LOOKS_UP && sizeof(T) == 2) {
        const Choices choices(fma(s, load(table), l));
        each_sixteen([&](int at, u8x16 code) INLINE { choices.put(out + at, code); });
    } else {
        each_sixteen(compute);
    }
}

template <int CODE, typename T>
static INLINE inline void whole_block(T *out, const uint8_t *block, const BlockHeads<CODE> &heads) {
    // NVFP4 has few weights per scale: AVX-512 computes them in less time.
    constexpr bool MAY_LOOK_UP = CODE == Q4_K || (CODE == NVFP4 && REGISTER < 64);
#pragma GCC unroll 8  // makes the shifts constants
    for (int i = 0; i < BLOCK / 32; i++) {
        const u8x32 codes = block_codes<CODE>(block, i);
        if constexpr (MAY_LOOK_UP && LOOKS_UP && sizeof(T) == 2) {
            const auto choices = [&](int group) INLINE {
                const f32x16 scale = splat(heads.scale(group)), low = splat(heads.low(group));
                return Choices(fma(scale, load(numbers_by_code(CODE)), low));
            };
            const Choices first = choices(32 * i / block_layout(CODE).group);
            first.put(out + 32 * i, low_half(codes));
            (CODE == NVFP4 ? choices(2 * i + 1) : first).put(out + 32 * i + 16, high_half(codes));
        } else {
            for (int half = 0; half < 2; half++) {
                const int group = (32 * i + 16 * half) / block_layout(CODE).group;
                const u8x16 code = load_codes((const uint8_t *)&codes + 16 * half);
                constexpr int KIND = CODE == NVFP4 ? TABLE : BITS4;
                const float middle = (float)block_layout(CODE).middle;
                const f32x16 numbers = numbers_of<KIND>(code, numbers_by_code(CODE)) - middle;
                store(out + 32 * i + 16 * half,
                      fma(splat(heads.scale(group)), numbers, splat(heads.low(group))));
            }
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

#if defined(__AVX512BF16__)

// The weights of a group, in steps of 32 along K.
template <int BITS, int CODE, int GROUP> struct Group;

template <int CODE, int GROUP> struct Group<8, CODE, GROUP> {
    const uint8_t *codes;
    __m512 scale, low;
    Group() = default;
    INLINE inline Group(const uint8_t *codes, const Heads &heads, int i, __m512)
        : codes(codes), scale(_mm512_set1_ps(heads.scale[i])), low(_mm512_set1_ps(heads.low[i])) {}
    INLINE inline __m512bh step(int i) const {
        const uint8_t *at = codes + 32 * i;
        __m512 numbers[2];
        if constexpr (CODE == FP8) {  // like from_fp8, all 32 at once
            __m512i halves = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)at));
            halves = _mm512_and_si512(_mm512_slli_epi16(halves, 7), _mm512_set1_epi16((short)0xbf80));
            numbers[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
            numbers[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
        } else {
            for (int k = 0; k < 2; k++) numbers[k] = (__m512)to_floats(load_codes(at + 16 * k));
        }
        for (auto &sixteen : numbers) sixteen = _mm512_fmadd_ps(scale, sixteen, low);
        return _mm512_cvtne2ps_pbh(numbers[1], numbers[0]);
    }
};

// The sixteen possible weights, indexed by code. They are stored twice, so that the bit above a code is
// ignored.
template <int CODE, int GROUP> struct Group<4, CODE, GROUP> {
    const uint8_t *codes;
    __m512i weights;
    Group() = default;
    INLINE inline Group(const uint8_t *codes, const Heads &heads, int i, __m512 numbers)
        : codes(codes) {
        const __m512 scale = _mm512_set1_ps(heads.scale[i]), low = _mm512_set1_ps(heads.low[i]);
        const __m512 values = _mm512_fmadd_ps(scale, numbers, low);
        weights = (__m512i)_mm512_cvtne2ps_pbh(values, values);
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
        return (__m512bh)_mm512_permutexvar_epi16(words, weights);
    }
};

// A block's weights. If sixteen or 32 codes share a scale, codes index a table of the possible weights.
template <int CODE> struct Group<0, CODE, BLOCK> {
    const uint8_t *block;
    const BlockHeads<CODE> *heads;
    __m512 numbers;  // that 4-bit codes stand for
    Group() = default;
    INLINE inline Group(const uint8_t *block, const BlockHeads<CODE> &heads, int, __m512 numbers)
        : block(block), heads(&heads), numbers(numbers) {}
    INLINE inline __m512bh step(int i) const {
        const auto weights = [&](int group, __m512 numbers) INLINE {
            return _mm512_fmadd_ps(_mm512_set1_ps(heads->scale(group)), numbers,
                                   _mm512_set1_ps(heads->low(group)));
        };
        if constexpr (in_pairs(CODE)) {  // two groups share a table: of two steps, or of one
            const __m512i both = _mm512_cvtepu8_epi16(load_bits<__m256i>(block + block_layout(CODE).lower.byte(i)));
            const __m512i upper = _mm512_set1_epi16(16);
            const __m512i second = CODE == NVFP4 ? _mm512_inserti64x4(upper, __m256i{}, 0) : upper;
            const int first = CODE == NVFP4 ? 2 * i : i & ~1;
            __m512i words = i % 2 ? _mm512_srli_epi16(both, 4) : _mm512_and_si512(both, _mm512_set1_epi16(15));
            if (CODE == NVFP4 || i % 2) words = _mm512_or_si512(words, second);
            const __m512bh table = _mm512_cvtne2ps_pbh(weights(first + 1, numbers), weights(first, numbers));
            return (__m512bh)_mm512_permutexvar_epi16(words, (__m512i)table);
        } else if constexpr (CODE == Q5_K) {
            const __m512 low = weights(i, numbers);
            const __m512 high = weights(i, _mm512_add_ps(numbers, _mm512_set1_ps(16)));
            const __m512i words = _mm512_cvtepu8_epi16((__m256i)block_codes<CODE>(block, i));
            return (__m512bh)_mm512_permutexvar_epi16(words, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        } else {
            const auto codes = (__m256i)(block_codes<CODE>(block, i) - (uint8_t)block_layout(CODE).middle);
            const auto code = [&](int half) INLINE {
                const __m128i sixteen = half ? _mm256_extracti128_si256(codes, 1) : _mm256_castsi256_si128(codes);
                return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen));
            };
            return _mm512_cvtne2ps_pbh(weights(2 * i + 1, code(1)), weights(2 * i, code(0)));
        }
    }
};

template <int CODE>
static INLINE inline void whole_block(bf16 *out, const uint8_t *block, const BlockHeads<CODE> &heads) {
    const Group<0, CODE, BLOCK> group(block, heads, 0, _mm512_load_ps(numbers_by_code(CODE)));
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK / 32; i++) _mm512_storeu_si512(out + 32 * i, (__m512i)group.step(i));
}

template <int CODE, int GROUP>
static INLINE inline void quick_group(bf16 *out, const uint8_t *codes, const Heads &heads, int i,
                                      const float *table) {
    const Group<bits_of(CODE), CODE, GROUP> group(codes, heads, i, _mm512_load_ps(table));
    for (int step = 0; step < GROUP / 32; step++)
        _mm512_storeu_si512(out + 32 * step, (__m512i)group.step(step));
}
#else
template <int CODE, int GROUP>
static inline void quick_group(bf16 *, const uint8_t *, const Heads &, int, const float *) {}
#endif
template <int CODE, int GROUP>
static inline void quick_group(float *, const uint8_t *, const Heads &, int, const float *) {}

template <int CODE, int GROUP, typename T, typename Fetch>
static inline void unpack_groups(T *out, const uint8_t *codes, const RowLayout &row, Fetch fetch) {
    const uint8_t *head = codes + row.code_bytes;
    const float *table = row.numbers();
    Heads heads;
    for (int64_t g = 0; g < row.whole; g += Heads::COUNT, head += Heads::COUNT * row.head_bytes) {
        const int count = (int)std::min<int64_t>(Heads::COUNT, row.whole - g);
        const bool quick = heads.read(row, head, count) && sizeof(T) == 2;
        for (int i = 0; i < count; i++, codes += GROUP * bits_of(CODE) / 8, out += GROUP) {
            fetch(g + i);
            if (quick) quick_group<CODE, GROUP>(out, codes, heads, i, table);
            else whole_group<CODE, GROUP>(out, codes, Head{heads.scale[i], heads.low[i]}, table);
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
        heads.read(block);
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
    else if ((encoding > E4M3 && encoding <= MXFP4) || encoding == CENTERED) f(std::integral_constant<int, TABLE>());
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
