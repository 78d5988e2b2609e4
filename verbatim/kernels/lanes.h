// Sixteen float lanes in registers, for the inner loops of products and attention.
//
// They are an f32x16, except with AVX2: gcc would keep a vector that is longer than a register in memory.
#pragma once

#include "wide.h"

namespace vb {

#define IN_REGISTERS static inline __attribute__((always_inline))

#if defined(__AVX2__) && !defined(__AVX512F__)
struct Lanes {
    __m256 low, high;
};

template <typename F> IN_REGISTERS Lanes each_half(Lanes a, const F &f) { return {f(a.low), f(a.high)}; }
template <typename F> IN_REGISTERS Lanes each_half(Lanes a, Lanes b, const F &f) {
    return {f(a.low, b.low), f(a.high, b.high)};
}
IN_REGISTERS __m256i words(__m256 v) { return _mm256_castps_si256(v); }
IN_REGISTERS __m256 floats(__m256i v) { return _mm256_castsi256_ps(v); }

// The bits at p.
IN_REGISTERS Lanes lanes_from(const void *p) {
    return {_mm256_loadu_ps((const float *)p), _mm256_loadu_ps((const float *)p + 8)};
}
IN_REGISTERS Lanes lanes_at(const float *p) { return lanes_from(p); }
IN_REGISTERS Lanes lanes_at(const bf16 *p) {
    const auto eight = [](const bf16 *p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
        return floats(_mm256_slli_epi32(wide, 16));
    };
    return {eight(p), eight(p + 8)};
}
IN_REGISTERS void store(float *p, Lanes v) { _mm256_storeu_ps(p, v.low), _mm256_storeu_ps(p + 8, v.high); }
IN_REGISTERS Lanes spread(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }

IN_REGISTERS Lanes mac(Lanes acc, Lanes a, Lanes b) {
    return {_mm256_fmadd_ps(a.low, b.low, acc.low), _mm256_fmadd_ps(a.high, b.high, acc.high)};
}
IN_REGISTERS Lanes add(Lanes a, Lanes b) { return each_half(a, b, [](__m256 x, __m256 y) { return x + y; }); }
IN_REGISTERS Lanes times(Lanes a, float x) { return each_half(a, [x](__m256 half) { return half * x; }); }

IN_REGISTERS Lanes bits_under(uint32_t mask, Lanes v) {
    return each_half(v, [mask](__m256 half) {
        return floats(_mm256_and_si256(words(half), _mm256_set1_epi32((int)mask)));
    });
}
// The elements of pairs of bf16, as floats.
IN_REGISTERS Lanes odd_elements(Lanes pairs) { return bits_under(0xffff0000u, pairs); }
IN_REGISTERS Lanes even_elements(Lanes pairs) {
    return each_half(pairs, [](__m256 half) { return floats(_mm256_slli_epi32(words(half), 16)); });
}

// Interleave within quarters the first half (low) or the last half (high) of the lanes, or of their pairs.
IN_REGISTERS Lanes low(Lanes a, Lanes b) {
    return each_half(a, b, [](__m256 x, __m256 y) { return _mm256_unpacklo_ps(x, y); });
}
IN_REGISTERS Lanes high(Lanes a, Lanes b) {
    return each_half(a, b, [](__m256 x, __m256 y) { return _mm256_unpackhi_ps(x, y); });
}
IN_REGISTERS Lanes low_pairs(Lanes a, Lanes b) {
    return each_half(a, b, [](__m256 x, __m256 y) {
        return floats(_mm256_unpacklo_epi16(words(x), words(y)));
    });
}
IN_REGISTERS Lanes high_pairs(Lanes a, Lanes b) {
    return each_half(a, b, [](__m256 x, __m256 y) {
        return floats(_mm256_unpackhi_epi16(words(x), words(y)));
    });
}

IN_REGISTERS Lanes as_lanes(f32x16 v) {
    Lanes out;
    std::memcpy(&out, &v, sizeof out);
    return out;
}
IN_REGISTERS f32x16 as_vector(Lanes v) {
    f32x16 out;
    std::memcpy(&out, &v, sizeof out);
    return out;
}
IN_REGISTERS float sum(Lanes v) {  // by the tree of vb::sum
    const __m256 eight = _mm256_add_ps(v.low, v.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
typedef f32x16 Lanes;

IN_REGISTERS Lanes lanes_from(const void *p) {
    Lanes bits;
    std::memcpy(&bits, p, sizeof bits);
    return bits;
}
template <typename T> IN_REGISTERS Lanes lanes_at(const T *p) { return load(p); }
IN_REGISTERS Lanes spread(float x) { return splat(x); }
IN_REGISTERS Lanes mac(Lanes acc, Lanes a, Lanes b) { return fma(a, b, acc); }
IN_REGISTERS Lanes add(Lanes a, Lanes b) { return a + b; }
IN_REGISTERS Lanes times(Lanes a, float x) { return a * x; }
IN_REGISTERS Lanes bits_under(uint32_t mask, Lanes v) { return (f32x16)((u32x16)v & mask); }
IN_REGISTERS Lanes odd_elements(Lanes pairs) { return odd_elements((u32x16)pairs); }
IN_REGISTERS Lanes even_elements(Lanes pairs) { return even_elements((u32x16)pairs); }
IN_REGISTERS Lanes as_lanes(f32x16 v) { return v; }
IN_REGISTERS f32x16 as_vector(Lanes v) { return v; }

#if defined(__AVX512F__)
IN_REGISTERS Lanes low(Lanes a, Lanes b) { return (Lanes)_mm512_unpacklo_ps((__m512)a, (__m512)b); }
IN_REGISTERS Lanes high(Lanes a, Lanes b) { return (Lanes)_mm512_unpackhi_ps((__m512)a, (__m512)b); }
IN_REGISTERS Lanes low_pairs(Lanes a, Lanes b) {
    return (Lanes)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
}
IN_REGISTERS Lanes high_pairs(Lanes a, Lanes b) {
    return (Lanes)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}
#else  // quarter by quarter: gcc splits a longer shuffle into single lanes
typedef float f32x4 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
template <class Quarter, class Function> IN_REGISTERS Lanes by_quarters(Lanes a, Lanes b, const Function &f) {
    Quarter x[4], y[4];
    std::memcpy(x, &a, sizeof a), std::memcpy(y, &b, sizeof b);
    for (int i = 0; i < 4; i++) x[i] = f(x[i], y[i]);
    std::memcpy(&a, x, sizeof a);
    return a;
}
#define INTERLEAVE(name, Quarter, ...)                                                             \
    IN_REGISTERS Lanes name(Lanes a, Lanes b) {                                                    \
        return by_quarters<Quarter>(a, b, [](Quarter x, Quarter y) {                               \
            return __builtin_shufflevector(x, y, __VA_ARGS__);                                     \
        });                                                                                        \
    }
INTERLEAVE(low, f32x4, 0, 4, 1, 5)
INTERLEAVE(high, f32x4, 2, 6, 3, 7)
INTERLEAVE(low_pairs, u16x8, 0, 8, 1, 9, 2, 10, 3, 11)
INTERLEAVE(high_pairs, u16x8, 4, 12, 5, 13, 6, 14, 7, 15)
#undef INTERLEAVE
#endif
#endif

#undef IN_REGISTERS

}  // namespace vb
