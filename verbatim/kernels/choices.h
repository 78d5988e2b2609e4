// Tables of the weights in bf16 that 4-bit codes may stand for, and the codes that look them up.
#pragma once

#include "blocks.h"

namespace {

using namespace vb;

static INLINE inline u8x16 load_codes(const uint8_t *p) { return load_bits<u8x16>(p); }

#if defined(__AVX512BW__)
// In one table of 32, by the five lower bits of a word. The fifth is ignored if both sixteens are the same.
class Choices {
    __m512i weights;

    static INLINE inline __m512i rounded(f32x16 lower, f32x16 upper) {
        if (HAS_PAIRS) return (__m512i)narrow_pairs(lower, upper);
        alignas(64) static constexpr uint16_t UPPER_HALVES[] = {
            1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
            33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
        return _mm512_permutex2var_epi16((__m512i)round_upper(lower), _mm512_load_si512(UPPER_HALVES),
                                         (__m512i)round_upper(upper));
    }

  public:
    INLINE inline Choices(f32x16 lower, f32x16 upper) : weights(rounded(lower, upper)) {}
    INLINE inline u32x16 look_up(__m512i words) const {
        return (u32x16)_mm512_permutexvar_epi16(words, weights);
    }
};

// A step of a group's 4-bit codes, as words; their upper bits are undefined.
template <int GROUP> static INLINE inline __m512i codes_of_step(const uint8_t *codes, int step) {
    if constexpr (GROUP == 32) {
        const __m256i both = _mm256_broadcastsi128_si256(load_bits<__m128i>(codes));
        const __m512i words = _mm512_cvtepu8_epi16(both);
        return _mm512_mask_srli_epi16(words, 0xffff0000, words, 4);
    }
    constexpr int HALF = GROUP < 64 ? 1 : GROUP / 64;
    const __m512i words = _mm512_cvtepu8_epi16(load_bits<__m256i>(codes + 32 * (step % HALF)));
    return step < HALF ? words : _mm512_srli_epi16(words, 4);
}

// The weights of a step of a block, where sixteen or 32 codes share a scale.
template <int CODE, typename F>
static INLINE inline u32x16 look_up_in_block(const uint8_t *block, int step, f32x16 numbers, F weights) {
    const __m256i codes = (__m256i)block_codes<CODE>(block, step);
    if constexpr (CODE == Q5_K) {
        const Choices choices(weights(step, numbers), weights(step, numbers + 16.0f));
        return choices.look_up(_mm512_cvtepu8_epi16(codes));
    }
    // Two groups share a table: of two steps, or of one.
    const uint8_t *at = block + block_layout(CODE).lower.byte(step);
    const __m512i both = _mm512_cvtepu8_epi16(load_bits<__m256i>(at));
    const __m512i upper = _mm512_set1_epi16(16), fifteen = _mm512_set1_epi16(15);
    const __m512i second = CODE == NVFP4 ? _mm512_inserti64x4(upper, __m256i{}, 0) : upper;
    __m512i words = step % 2 ? _mm512_srli_epi16(both, 4) : _mm512_and_si512(both, fifteen);
    if (CODE == NVFP4 || step % 2) words = _mm512_or_si512(words, second);
    const int lower = CODE == NVFP4 ? 2 * step : step & ~1;
    return Choices(weights(lower, numbers), weights(lower + 1, numbers)).look_up(words);
}
#else
// By the four lower bits of a code: in sixteen for the first sixteen codes, and in sixteen for the last.
class Choices {
#if defined(__AVX2__)
    __m256i lower, upper;  // bytes

    // The lower bytes, and then the upper ones.
    static INLINE inline __m256i bytes_of(f32x16 weights) {
        const u32x16 rounded = round_upper(weights);
        const __m256i quarters = _mm256_setr_epi8(2, 6, 10, 14, 3, 7, 11, 15, -1, -1, -1, -1, -1, -1, -1, -1,
                                                  2, 6, 10, 14, 3, 7, 11, 15, -1, -1, -1, -1, -1, -1, -1, -1);
        const __m256i first = _mm256_shuffle_epi8((__m256i)rounded.low, quarters);
        const __m256i last = _mm256_shuffle_epi8((__m256i)rounded.high, quarters);
        const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
        return _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(first, last), order);
    }

  public:
    INLINE inline Choices(f32x16 first, f32x16 last) {
        const __m256i a = bytes_of(first), b = bytes_of(last);
        lower = _mm256_permute2x128_si256(a, b, 0x20), upper = _mm256_permute2x128_si256(a, b, 0x31);
    }
    INLINE inline u32x16 look_up(u8x32 codes) const {
        const auto bytes = [&](__m256i table) INLINE {  // zip takes the low half of both lanes first
            return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(table, (__m256i)(codes & 15)), 0xd8);
        };
        typedef decltype(u32x16::low) Eight;
        const auto a = (Eight)bytes(lower), b = (Eight)bytes(upper);
        return {zip<uint8_t, false>(a, b), zip<uint8_t, true>(a, b)};
    }
#else
    u8x16 lower[2], upper[2];  // bytes

    static INLINE inline u8x16 look_up(u8x16 table, u8x16 at) {
#if defined(__aarch64__)
        return (u8x16)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)at);
#else
        u8x16 out;
        for (int i = 0; i < 16; i++) out[i] = table[at[i]];
        return out;
#endif
    }

  public:
    INLINE inline Choices(f32x16 first, f32x16 last) {
        for (int i = 0; i < 2; i++) {
            bf16 all[16];
            store_bits(all, convert<u16x16>(round_upper(i ? last : first) >> 16));
            for (int n = 0; n < 16; n++) lower[i][n] = (uint8_t)all[n], upper[i][n] = all[n] >> 8;
        }
    }
    INLINE inline u32x16 look_up(u8x32 codes) const {
        u8x16 pairs[4];
        for (int i = 0; i < 2; i++) {
            const u8x16 at = (i ? high_half(codes) : low_half(codes)) & 15;
            const u8x16 a = look_up(lower[i], at), b = look_up(upper[i], at);
            pairs[2 * i] = zip<uint8_t, false>(a, b), pairs[2 * i + 1] = zip<uint8_t, true>(a, b);
        }
        return load_bits<u32x16>(pairs);
    }
#endif
};

// A step of a group's 4-bit codes; their upper bits are undefined.
template <int GROUP> static INLINE inline u8x32 codes_of_step(const uint8_t *codes, int step) {
    constexpr int HALF = GROUP / 64;
    const auto upper = [](auto both) INLINE {
        typedef uint16_t Words __attribute__((vector_size(sizeof both)));
        return (decltype(both))((Words)both >> 4);
    };
    if constexpr (GROUP == 32) return concat<u8x32>(load_codes(codes), upper(load_codes(codes)));
    const auto both = load_bits<u8x32>(codes + 32 * (HALF ? step % HALF : 0));
    return step < HALF ? both : upper(both);
}

template <int CODE, typename F>
static INLINE inline u32x16 look_up_in_block(const uint8_t *block, int step, f32x16 numbers, F weights) {
    constexpr int GROUP = block_layout(CODE).group;
    const int first = 32 * step / GROUP, last = (32 * step + 16) / GROUP;
    return Choices(weights(first, numbers), weights(last, numbers)).look_up(block_codes<CODE>(block, step));
}
#endif

}  // namespace
