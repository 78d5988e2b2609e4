// Common parts of all matrix products: the operands, and one step along K.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "packed.h"
#include "wide.h"

#define NOINLINE __attribute__((noinline))

namespace {

using namespace vb;

// Calls f(0), .., f(N - 1), unrolled before the compiler allocates registers.
template <typename F, int... I>
static INLINE inline void each_of([[maybe_unused]] F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F> static INLINE inline void each(F f) {
    each_of(f, std::make_integer_sequence<int, N>());
}

// The output of a product in T: rounded to T, or in float.
template <typename T> struct Output {
    void *at;
    bool floats;  // ignored if T is float, so that nothing is decided at run time
    Output operator+(int64_t n) const {
        return {(char *)at + n * (int64_t)(floats ? sizeof(float) : sizeof(T)), floats};
    }
    template <typename F> INLINE inline void as_pointer(F f) const {
        if (std::is_same_v<T, float> || floats) f((float *)at);
        else f((T *)at);
    }
};

static inline void store_all(float *p, f32x16 v) { store(p, v); }
static inline void store_all(bf16 *p, f32x16 v) {
    u16x16 bits = narrow(v);
    std::memcpy(p, &bits, sizeof bits);
}

// ---- one step: STEP values of each operand, and their products added to an accumulator ----

#if defined(__AVX2__) && !defined(__AVX512F__)
// Sixteen lanes in two registers. gcc would keep a vector that is longer than a register in memory.
struct Lanes {
    __m256 low, high;
};
static INLINE inline Lanes lanes_at(const float *p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
static INLINE inline __m256 eight_at(const bf16 *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static INLINE inline Lanes lanes_at(const bf16 *p) { return {eight_at(p), eight_at(p + 8)}; }
static INLINE inline Lanes mac(Lanes acc, Lanes a, Lanes b) {
    return {_mm256_fmadd_ps(a.low, b.low, acc.low), _mm256_fmadd_ps(a.high, b.high, acc.high)};
}
static INLINE inline f32x16 as_vector(Lanes v) {
    f32x16 out;
    std::memcpy(&out, &v, sizeof out);
    return out;
}
static INLINE inline float sum(Lanes v) {  // by the tree of vb::sum
    const __m256 eight = _mm256_add_ps(v.low, v.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
typedef f32x16 Lanes;
template <typename T> static INLINE inline Lanes lanes_at(const T *p) { return load(p); }
static INLINE inline Lanes mac(Lanes acc, Lanes a, Lanes b) { return fma(a, b, acc); }
static INLINE inline f32x16 as_vector(Lanes v) { return v; }
#endif

template <typename T> static INLINE inline Lanes lanes_first(const T *p, int n) {
    T lanes[16] = {};
    std::memcpy(lanes, p, n * sizeof(T));
    return lanes_at((const T *)lanes);
}

static INLINE inline Lanes load_step(const float *p) { return lanes_at(p); }
#if defined(__AVX512F__)
static inline f32x16 load_step_first(const float *p, int n) {
    return (f32x16)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
#else
static INLINE inline Lanes load_step_first(const float *p, int n) { return lanes_first(p, n); }
#endif

// ---- bf16 as floats (wide.h) ----

#if defined(__AVX512BF16__)
template <typename T> constexpr bool WIDENS = std::is_same_v<T, bf16>;

// Writes the floats of `n` bf16 as whole steps, padded with zeros; steps are `apart` floats apart.
static inline void widen_steps(float *to, int64_t apart, const bf16 *from, int64_t n) {
    for (; n > 0; n -= 32, from += 32, to += 2 * apart) {
        const __mmask32 there = n >= 32 ? ~0u : (1u << n) - 1;
        const u32x16 pairs = (u32x16)_mm512_maskz_loadu_epi16(there, from);
        store(to, odd_elements(pairs)), store(to + apart, even_elements(pairs));
    }
}
#else
template <typename T> constexpr bool WIDENS = false;
#endif

#if defined(__AVX512BF16__)
template <typename T> constexpr int STEP = 64 / sizeof(T);
static inline __m512bh load_step(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
static inline __m512bh load_step_first(const bf16 *p, int n) {
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
}
static inline f32x16 mac(f32x16 acc, __m512bh a, __m512bh b) {
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, a, b);
}
#else
template <typename T> constexpr int STEP = 16;
static INLINE inline Lanes load_step(const bf16 *p) { return lanes_at(p); }
static INLINE inline Lanes load_step_first(const bf16 *p, int n) { return lanes_first(p, n); }
#endif

// The type in which tiles read rows: float where bf16 would be widened for each product.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <typename T> using Input = float;
static inline void copy_inputs(float *to, const bf16 *from, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, eight_at(from + i));
    for (; i < n; i++) to[i] = to_float(from[i]);
}
#else
template <typename T> using Input = T;
#endif
template <typename T> static inline void copy_inputs(T *to, const T *from, int64_t n) {
    std::memcpy(to, from, n * sizeof(T));
}

}  // namespace
