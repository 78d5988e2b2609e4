// Sixteen float lanes, the same on every instruction set.
//
// Every kernel is written once on these helpers and compiled once per instruction set. The order of
// the arithmetic is spelled out here and never left to the compiler: sources are compiled with
// -ffp-contract=off, a fused multiply-add happens only where `fma` says so, and a horizontal sum has
// one fixed tree. That is what makes a row's bits independent of the rows computed beside it, and of the
// instruction set. NaNs alone may differ, in sign and payload.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace vb {

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t bf16;  // the upper half of a float's bits

// Copies the bits, as an addition to a vector of zeros would not do for -0 and NaN.
static inline f32x16 splat(float x) {
    return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

static inline f32x16 load(const float *p) {
    f32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Whether lines from memory are prefetched to the L2 instead of the L1 cache. A core can wait for more of
// them there; L1 is better where the arithmetic takes longer than memory does.
#if defined(__AVX512BF16__)
constexpr bool TO_L2 = true;
#else
constexpr bool TO_L2 = false;
#endif

// Always inlined: gcc takes it for a function without effects, and drops calls of it.
template <bool L2> static inline __attribute__((always_inline)) void prefetch(const void *p) {
    __builtin_prefetch(p, 0, L2 ? 2 : 3);
}

static inline void store(float *p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

static inline f32x16 widen(u16x16 bits) {
    u32x16 wide = __builtin_convertvector(bits, u32x16) << 16;
    return (f32x16)wide;
}

static inline f32x16 load(const bf16 *p) {
    u16x16 bits;
    std::memcpy(&bits, p, sizeof bits);
    return widen(bits);
}

// The first n (0 to 16) lanes from memory, the others zero.
template <typename T> static inline f32x16 load_first(const T *p, int n) {
    T lanes[16] = {};
    std::memcpy(lanes, p, n * sizeof(T));
    return load(lanes);
}

static inline void store_first(float *p, f32x16 v, int n) {
    float lanes[16];
    store(lanes, v);
    std::memcpy(p, lanes, n * sizeof(float));
}

// Stores results that are not read again soon, without loading their cache lines. `p` is aligned to 64 bytes.
// After the last store, `finish_stores_past_caches` makes them visible to other threads.
static inline void store_past_caches(float *p, f32x16 v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
    __m256 halves[2];
    std::memcpy(halves, &v, sizeof v);
    _mm256_stream_ps(p, halves[0]);
    _mm256_stream_ps(p + 8, halves[1]);
#else
    store(p, v);
#endif
}

static inline void finish_stores_past_caches() {
#if defined(__AVX512F__) || defined(__AVX2__)
    _mm_sfence();
#endif
}

static inline f32x16 to_floats(u8x16 codes) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)codes));
#else  // in steps of twice the width: gcc splits a longer one into bytes
    const u16x16 wide = __builtin_convertvector(codes, u16x16);
    return __builtin_convertvector(__builtin_convertvector(wide, i32x16), f32x16);
#endif
}

static inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float from_half(uint32_t bits) {
#if defined(__F16C__)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128((int)bits)));
#else
    const float size = float_of((bits & 0x7fff) << 13) * 0x1p112f;
    return bits & 0x8000 ? -size : size;
#endif
}

static inline float to_float(float x) { return x; }

static inline float to_float(bf16 x) {
    return float_of((uint32_t)x << 16);
}

// Element i of `values`, which are in T or in float.
template <typename T> static inline float value_at(const void *values, bool is_f32, int64_t i) {
    return is_f32 ? ((const float *)values)[i] : to_float(((const T *)values)[i]);
}

// Round to nearest, ties to even, as torch rounds.
static inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The scale and the smallest element that a group of codes stores: changed if an element read back could be
// subnormal, as products of bf16 flush subnormals. As in quantization/rows.py.
static inline float stored_scale(float step) { return step > 0 && step < 0x1p-117f ? 0x1p-117f : step; }
static inline float stored_low(float low) {
    return low < 0 && low > -0x1p-126f ? -0x1p-126f : low > 0 && low < 0x1p-126f ? 0 : low;
}

static inline void put(float *p, float x) { *p = x; }
static inline void put(bf16 *p, float x) { *p = to_bf16(x); }

// a * b + c, rounded once.
#if defined(__FMA__)
static inline f32x8 fma(f32x8 a, f32x8 b, f32x8 c) { return (f32x8)_mm256_fmadd_ps(a, b, c); }
#endif
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    f32x8 x[2], y[2], z[2];
    std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);
    for (int i = 0; i < 2; i++) z[i] = fma(x[i], y[i], z[i]);
    f32x16 out;
    std::memcpy(&out, z, 64);
    return out;
#elif defined(__aarch64__)
    float32x4_t x[4], y[4], z[4];
    std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);
    for (int i = 0; i < 4; i++) z[i] = vfmaq_f32(z[i], x[i], y[i]);
    std::memcpy(&c, z, 64);
    return c;
#else
    // The product is exact in double. A sum that is not exact is rounded to an odd number (Boldo and
    // Melquiond 2008, "Emulation of FMA and correctly rounded sums"), so that rounding it again to a float
    // gives what one rounding would. `error` is Knuth's, of the sum.
    typedef double f64x16 __attribute__((vector_size(128)));
    typedef int64_t i64x16 __attribute__((vector_size(128)));
    const f64x16 product = __builtin_convertvector(a, f64x16) * __builtin_convertvector(b, f64x16);
    const f64x16 addend = __builtin_convertvector(c, f64x16), total = product + addend;
    const f64x16 part = total - product, error = (product - (total - part)) + (addend - part);
    const i64x16 inexact = (error > 0) | (error < 0), even = ((i64x16)total & 1) - 1;
    const i64x16 outwards = ((error > 0) ^ (total < 0)) & 2;  // 2: the exact sum is larger in size; 0: smaller
    return __builtin_convertvector((f64x16)((i64x16)total + ((outwards - 1) & inexact & even)), f32x16);
#endif
}

template <class V> static inline V max(V a, V b) { return a > b ? a : b; }

// The sum of the lanes, always by the same tree: 16 -> 8 -> 4 -> 2 -> 1, halves added.
static inline float sum(f32x16 v) {
#if defined(__AVX512F__)
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                                       _mm512_extractf32x8_ps((__m512)v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float x[16];
    store(x, v);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
#endif
}

static inline float max_lane(f32x16 v) {
    float x[16];
    store(x, v);
    float m = x[0];
    for (int i = 1; i < 16; i++) m = x[i] > m ? x[i] : m;
    return m;
}

// The bits of floats rounded to bf16, as `to_bf16` rounds one.
template <class Words, class V> static inline Words bf16_bits(V v) {
    const Words bits = (Words)v, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
    return (rounded & ~nan) | (nan & 0x7fc0u);
}

// Sixteen floats rounded to bf16.
static inline u16x16 narrow(f32x16 v) {
#if defined(__AVX512BF16__)
    // The instruction treats denormals as zero and keeps the bits of NaNs.
    constexpr int NANS = 0x81, DENORMAL = 0x20;
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)v, NANS | DENORMAL), 1))
        return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#endif
    return __builtin_convertvector(bf16_bits<u32x16>(v), u16x16);
}

// Sixteen pairs of bf16: the floats of `a` and then those of `b`, rounded like `narrow`, with subnormals as
// zero, as the instruction takes them.
static inline u32x16 narrow_pairs(f32x16 a, f32x16 b) {
#if defined(__AVX512BF16__)
    return (u32x16)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    const auto flushed = [](f32x16 v) {
        const u32x16 bits = (u32x16)v;
        return narrow((f32x16)(bits & ((u32x16)((bits & 0x7f800000u) != 0) | 0x80000000u)));
    };
    const u16x16 halves[2] = {flushed(a), flushed(b)};
    u32x16 pairs;
    std::memcpy(&pairs, halves, sizeof pairs);
    return pairs;
#endif
}

// The elements of sixteen pairs of bf16 as floats.
static inline f32x16 odd_elements(u32x16 pairs) { return (f32x16)(pairs & 0xffff0000u); }
static inline f32x16 even_elements(u32x16 pairs) { return (f32x16)(pairs << 16); }

// For x <= 0: x = n ln 2 + r with |r| <= ln 2 / 2; returns exp(r) - 1 (its Taylor series to r^7, error below
// 5e-9), and 2^n in `power`. An x below -87 is taken as -87, so that 2^n is a normal number.
template <class V> static inline V split_exp(V x, V *power) {
    typedef decltype(x < x) Ints;
    const V none{}, shift = none + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    x = x < -87.0f ? none - 87.0f : x;
    V shifted = fma(x, none + 1.44269504f, shift);
    V n = shifted - shift;
    V r = fma(n, none - 0.693359375f, x);  // ln 2 in two parts, the first exact times n
    r = fma(n, none + 2.12194440e-4f, r);
    *power = (V)(((Ints)shifted - (Ints)shift + 127) << 23);
    V series = none + 1.0f / 5040;
    series = fma(series, r, none + 1.0f / 720);
    series = fma(series, r, none + 1.0f / 120);
    series = fma(series, r, none + 1.0f / 24);
    series = fma(series, r, none + 1.0f / 6);
    series = fma(series, r, none + 0.5f);
    return fma(series, r * r, r);
}

// exp(x) for x <= 0, exactly 0 below -87; NaN stays NaN.
template <class V> static inline V exp_nonpositive(V x) {
    V power, rest = split_exp(x, &power);
    return x < -87.0f ? V{} : fma(power, rest, power);
}

// tanh(|x|) = -t / (t + 2) with t = exp(-2|x|) - 1, which is accurate near zero.
template <class V> static inline V tanh(V x) {
    typedef decltype(x < x) Ints;
    Ints sign = (Ints)x & INT32_MIN;
    V power, rest = split_exp(-2.0f * (V)((Ints)x ^ sign), &power);
    V t = fma(power, rest, power - 1.0f);
    return (V)((Ints)(-t / (t + 2.0f)) ^ sign);
}

}  // namespace vb
