// Blocks of 256 numbers: GGUF's types Q2_K to Q6_K in the layout of a file, and NVFP4.
//
// A block has groups of 16 or 32, each with a scale of 4 to 8 bits and in some types a minimum; one or two
// half floats that scale all of these; and codes of 2 to 6 bits, in planes of lower and upper bits. NVFP4 has
// groups of 16 with an FP8 scale, a float that scales these, and FP4 codes.
#pragma once

#include "simd.h"

namespace {

using namespace vb;

typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));

// 256 times the `Encoding` of packing.py.
enum Block : int {
    Q4_K = 256 * 8, Q5_K = 256 * 10, Q6_K = 256 * 11, Q3_K = 256 * 12, Q2_K = 256 * 13, NVFP4 = 256 * 14
};
constexpr int BLOCK = 256;

// A plane: some bits of all codes. Steps of 32 codes that lie `span` bytes apart share bytes.
struct Plane {
    int at, bits, span;
    constexpr int byte(int step) const {
        const int each = span / 32, share = 8 / bits * each;
        return at + step / share * span + step % each * 32;
    }
    constexpr int shift(int step) const { return step / (span / 32) % (8 / bits) * bits; }
};

// `scale` and `low`: offsets of the half floats, or of the float. `middle` is subtracted from the codes.
struct BlockLayout {
    int bytes, group, scales, scale, low, middle;
    Plane lower, upper;
};

constexpr BlockLayout block_layout(int code) {
    switch (code) {
    case Q2_K: return {84, 16, 0, 80, 82, 0, {16, 2, 32}, {}};
    case Q3_K: return {110, 16, 96, 108, 0, 4, {32, 2, 32}, {0, 1, 32}};
    case Q4_K: return {144, 32, 4, 0, 2, 0, {16, 4, 32}, {}};
    case Q5_K: return {176, 32, 4, 0, 2, 0, {48, 4, 32}, {16, 1, 32}};
    case Q6_K: return {210, 16, 192, 208, 0, 32, {0, 4, 64}, {128, 2, 32}};
    case NVFP4: return {148, 16, 4, 0, 0, 0, {20, 4, 32}, {}};
    default: return {};
    }
}

// The value of an FP8 (E4M3) code, divided by 2^8.
static inline float from_fp8(uint8_t code) { return from_half((code & 0x80) << 8 | (code & 0x7f) << 7); }

// The same for codes that are the upper bytes of words.
static INLINE inline f32x16 from_upper_fp8(u16x16 words) {
    typedef Vector<int16_t, 16> Signed;
    return from_halves((u16x16)((Signed)words >> 1) & (uint16_t)0xbf80);
}
static INLINE inline f32x16 from_fp8(u8x16 codes) {
#if defined(__AVX2__)
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)codes), 7);
    return from_halves(load_bits<u16x16>(&words) & (uint16_t)0xbf80);
#else
    return from_upper_fp8(convert<u16x16>(codes) << 8);
#endif
}

// The bits that a plane has of a step of 32 codes, shifted to begin at bit `left`.
static INLINE inline u8x32 plane_codes(const uint8_t *block, const Plane &plane, int step, int left) {
    typedef uint16_t Words __attribute__((vector_size(32)));
    const auto words = load_bits<Words>(block + plane.byte(step));
    const int right = plane.shift(step) - left;
    const uint8_t mask = (uint8_t)(((1 << plane.bits) - 1) << left);
    return (u8x32)(right < 0 ? words << -right : words >> right) & mask;
}

// The codes of a step of 32.
template <int CODE> static INLINE inline u8x32 block_codes(const uint8_t *block, int step) {
    constexpr BlockLayout L = block_layout(CODE);
    u8x32 codes = plane_codes(block, L.lower, step, 0);
    if (L.upper.bits) codes |= plane_codes(block, L.upper, step, L.lower.bits);
    return codes;
}

// The scales of a block's 16 or 8 groups, and their minimums, if any.
template <int CODE> struct BlockHeads {
    static constexpr BlockLayout L = block_layout(CODE);
    static constexpr int COUNT = 1, GROUPS = BLOCK / L.group;  // COUNT: of blocks
    alignas(64) float values[32];

    // Returns what `Heads::read` of packed.h does. Half floats are never too small.
    INLINE inline bool read(const uint8_t *block) {
        u8x16 at{};
        std::memcpy(&at, block + L.scales, CODE == Q3_K ? 12 : 16);
        if (L.group == 32) {  // eight of each
            const u32x4 lower = words<0, 0, 1, 1>(at) >> u32x4{0, 2, 0, 2} & u32x4{SIX, UPPER, SIX, UPPER};
            const u32x4 upper = words<2, 2, 2, 2>(at) >> u32x4{0, 0, 0, 4} & u32x4{0, FOUR, 0, FOUR};
            put(0, halves_at(block) * to_floats((u8x16)(lower | upper)));
        } else if (CODE == NVFP4) {  // `from_fp8` divides by 2^8
            put(0, splat(load_bits<float>(block + L.scale)) * (from_fp8(at) * 256.0f));
        } else if (CODE == Q2_K) {
            put(0, splat(half_at(block + L.scale)) * to_floats(at & 15));
            put(16, splat(-half_at(block + L.low)) * to_floats(at >> 4));
        } else {
            f32x16 factors;
            if (CODE == Q6_K) factors = to_floats(at ^ 128) - 128.0f;
            else {
                const u32x4 lower = words<0, 1, 0, 1>(at) >> u32x4{0, 0, 4, 4} & FOUR;
                const u32x4 upper = words<2, 2, 2, 2>(at) << u32x4{4, 2, 0, 0} >> u32x4{0, 0, 0, 2} & UPPER;
                factors = to_floats((u8x16)(lower | upper)) - 32.0f;
            }
            put(0, splat(half_at(block + L.scale)) * factors);
        }
        // Broadcasting numbers from memory costs less than from other lanes.
        asm("" : "+m"(values));
        constexpr uint32_t ONE = 1, LEAST = (127 - 108) << 23;  // FP8 scales are at least 2^-9
        return CODE != NVFP4 || (load_bits<uint32_t>(block + L.scale) & INT32_MAX) - ONE >= LEAST - ONE;
    }
    INLINE inline float scale(int group) const { return values[group]; }
    // Adding -0 preserves the sign of a zero.
    INLINE inline float low(int group) const {
        return CODE == NVFP4 ? -0.0f : L.middle ? 0.0f : values[GROUPS + group];
    }

  private:
    static constexpr uint32_t FOUR = 0x0f0f0f0f, SIX = 0x3f3f3f3f, UPPER = 0x30303030;  // masks of bytes
    INLINE inline void put(int at, f32x16 v) { store(values + at, roundable(v)); }
    template <int A, int B, int C, int D> static INLINE inline u32x4 words(u8x16 bytes) {
        return __builtin_shufflevector((u32x4)bytes, (u32x4)bytes, A, B, C, D);
    }
    static INLINE inline float half_at(const uint8_t *p) { return from_half(load_bits<uint16_t>(p)); }
    // Eight copies of a block's first half float, and eight of the second with the opposite sign.
    static INLINE inline f32x16 halves_at(const uint8_t *block) {
#if defined(__AVX512VL__)
        const __m128 two = _mm_cvtph_ps(_mm_cvtsi32_si128(load_bits<int>(block)));
        const u32x16 places{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
        const __m512 all = _mm512_permutexvar_ps((__m512i)places, _mm512_castps128_ps512(two));
        return (f32x16)((u32x16)all ^ places << 31);
#else
        const float d = half_at(block), m = -half_at(block + 2);
        return select(lane_numbers<i32x16>() < 8, splat(d), splat(m));
#endif
    }
};

}  // namespace
