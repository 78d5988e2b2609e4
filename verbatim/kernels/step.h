// Common parts of all matrix products: the operands, and one step along K.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "packed.h"

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

// An array of f(0), .., f(N - 1).
template <typename F, int... I>
static INLINE inline auto array_of(F f, std::integer_sequence<int, I...>) {
    return std::array<decltype(f(std::integral_constant<int, 0>())), sizeof...(I)>{
        f(std::integral_constant<int, I>())...};
}
template <int N, typename F> static INLINE inline auto array_of(F f) {
    return array_of(f, std::make_integer_sequence<int, N>());
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

// ---- one step along K ----

static INLINE inline f32x16 mac(f32x16 acc, f32x16 a, f32x16 b) { return fma(a, b, acc); }

// A step is 64 bytes: sixteen floats, or 32 bf16, in PARTS of sixteen lanes. A part is a vector of floats, or
// of pairs of bf16 where the processor multiplies them. Elsewhere bf16 has two parts: the floats of its odd
// elements, and those of its even ones (wide.h).
template <typename T> constexpr int STEP = 64 / sizeof(T);
template <typename T> constexpr bool IS_BF16 = std::is_same_v<T, bf16>;
template <typename T> constexpr int PARTS = IS_BF16<T> && !HAS_PAIRS ? 2 : 1;

// Part P of a step; or of one with only the first n elements, the others zero.
template <int P> static INLINE inline f32x16 part_of(const float *p) { return load(p + 16 * P); }
template <int P> static INLINE inline f32x16 part_of(const Sixteens &step) { return step.at[P]; }
template <int P> static INLINE inline f32x16 part_of_first(const float *p, int n) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    return load_first(p, n);
#endif
}
#if defined(__AVX512BF16__)
template <int P> static inline __m512bh part_of(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
template <int P> static INLINE inline __m512bh part_of(__m512bh pairs) { return pairs; }
template <int P> static inline __m512bh part_of_first(const bf16 *p, int n) {
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
}
static INLINE inline f32x16 mac(f32x16 acc, __m512bh a, __m512bh b) {
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, a, b);
}
#else
template <int P> static INLINE inline f32x16 part_of(const bf16 *p) {
    const u32x16 pairs = load_bits<u32x16>(p);
    return P == 0 ? odd_elements(pairs) : even_elements(pairs);
}
template <int P> static INLINE inline f32x16 part_of_first(const bf16 *p, int n) {
    bf16 all[32] = {};
    std::memcpy(all, p, n * sizeof *p);
    return part_of<P>((const bf16 *)all);
}
#endif

// Writes the floats of `n` bf16 as whole steps, padded with zeros; their parts are `apart` floats apart.
static inline void widen_steps(float *to, int64_t apart, const bf16 *from, int64_t n) {
    bf16 last[32] = {};
    for (; n > 0; n -= 32, from += 32, to += 2 * apart) {
        if (n < 32) from = (const bf16 *)std::memcpy(last, from, n * sizeof *from);
        const u32x16 pairs = load_bits<u32x16>(from);
        store(to, odd_elements(pairs)), store(to + apart, even_elements(pairs));
    }
}

// The type in which tiles read rows: float where bf16 would be widened for each product.
template <typename T> using Input = std::conditional_t<PARTS<T> == 2, float, T>;
static inline void copy_inputs(float *to, const bf16 *from, int64_t n) { widen_steps(to, 16, from, n); }
template <typename T> static inline void copy_inputs(T *to, const T *from, int64_t n) {
    std::memcpy(to, from, n * sizeof(T));
}

}  // namespace
