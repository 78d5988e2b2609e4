// The noise of a draw: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
// 3"), keyed by the seed and counted by (id / 4, position, sample index, 0), and its Gumbel transform.
//
// One call computes the noise of four neighbouring ids. Eight calls run side by side in 64-bit lanes. Only
// the low half of a lane counts, because a 32 x 32 -> 64 bit product reads nothing else, so the high halves
// may hold garbage between the rounds and need no masking.
#pragma once

#include <cmath>

#include "simd.h"

namespace vb::sampling {

typedef Vector<uint64_t, 8> u64x8;

// The low halves of the lanes times m, as whole 64-bit products.
static inline u64x8 mul_low(u64x8 a, uint32_t m) {
#if defined(__AVX512F__)
    return (u64x8)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(m));
#elif defined(__AVX2__)
    const __m256i factor = _mm256_set1_epi64x(m);
    const auto half = [=](auto a) INLINE { return (decltype(a))_mm256_mul_epu32((__m256i)a, factor); };
    return {half(a.low), half(a.high)};
#else
    return (a & 0xffffffffu) * (uint64_t)m;
#endif
}

struct Noise {
    static constexpr uint32_t M0 = 0xD2511F53u, M1 = 0xCD9E8D57u;
    uint32_t key0[10], key1[10];
    uint32_t position, sample_index;

    Noise(uint64_t seed, uint32_t sample_index, uint32_t position)
        : position(position), sample_index(sample_index) {
        for (int r = 0; r < 10; r++) {
            key0[r] = (uint32_t)seed + r * 0x9E3779B9u;
            key1[r] = (uint32_t)(seed >> 32) + r * 0xBB67AE85u;
        }
    }

    // The random word of one id.
    uint32_t bits(uint32_t id) const {
        uint32_t c[4] = {id / 4, position, sample_index, 0};
        for (int r = 0; r < 10; r++) {
            uint64_t p0 = (uint64_t)M0 * c[0], p1 = (uint64_t)M1 * c[2];
            c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ key0[r];
            c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ key1[r];
            c[1] = (uint32_t)p1;
            c[3] = (uint32_t)p0;
        }
        return c[id % 4];
    }

    // The random words of the 32 ids from `first` on (a multiple of 4), in the order of the ids. Lane 2j
    // computes call j and lane 2j + 1 call 4 + j, so that the last step only interleaves neighbours.
    void bits32(uint32_t first, u32x16 out[2]) const {
        static constexpr uint64_t ORDER[] = {0, 4, 1, 5, 2, 6, 3, 7};
        const auto order = load_bits<u64x8>(ORDER);
        u64x8 c0 = order + (uint64_t)(first / 4), c1 = u64x8{} + position;
        u64x8 c2 = u64x8{} + sample_index, c3 = {};
        for (int r = 0; r < 10; r++) {
            u64x8 p0 = mul_low(c0, M0), p1 = mul_low(c2, M1);
            c0 = (p1 >> 32) ^ c1 ^ (u64x8{} + key0[r]);
            c2 = (p0 >> 32) ^ c3 ^ (u64x8{} + key1[r]);
            c1 = p1;
            c3 = p0;
        }
        u64x8 head = (c0 & 0xffffffffu) | (c1 << 32), tail = (c2 & 0xffffffffu) | (c3 << 32);
        out[0] = (u32x16)zip<uint64_t, false>(head, tail), out[1] = (u32x16)zip<uint64_t, true>(head, tail);
    }
};

// -log(-log(1 - u)) with u = (bits + 1/2) / 2^32, in double, rounded once; it falls as bits rise.
static inline float gumbel(uint32_t bits) {
    return (float)-std::log(-std::log1p(-((double)bits + 0.5) * 0x1p-32));
}

// A cheap number that is at most log2(bits) and at most 0.09 below it: the bits of a float, read as an
// integer, are its logarithm, interpolated linearly between powers of two.
static inline f32x16 log2_below(u32x16 bits) {
#if defined(__AVX512F__)
    f32x16 value = (f32x16)_mm512_cvtepu32_ps((__m512i)bits);
#else
    f32x16 value = convert<f32x16>((i32x16)(bits >> 1)) * splat(2.0f);
#endif
    return convert<f32x16>((i32x16)value) * splat(0x1p-23f) - splat(127.0f);
}

}  // namespace vb::sampling
