// Sixteen float lanes, the same on every instruction set.
//
// Every kernel is written once on these helpers and compiled once per instruction set. The order of
// the arithmetic is spelled out here and never left to the compiler: sources are compiled with
// -ffp-contract=off, a fused multiply-add happens only where `fma` says so, and a horizontal sum has
// one fixed tree. That is what makes a row's bits independent of the rows computed beside it, and of the
// instruction set. NaNs alone may differ, in sign and payload.
#pragma once

#include "vectors.h"

namespace vb {

typedef Vector<float, 16> f32x16;
typedef Vector<int32_t, 16> i32x16;
typedef Vector<uint32_t, 16> u32x16;
typedef Vector<uint16_t, 16> u16x16;
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef uint16_t bf16;  // the upper half of a float's bits

static INLINE inline f32x16 splat(float x) { return spread<f32x16>(x); }
static INLINE inline f32x16 load(const float *p) { return load_bits<f32x16>(p); }

// Whether the processor multiplies pairs of bf16, and rounds to them (wide.h).
#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

// Whether lines from memory are prefetched to the L2 instead of the L1 cache. A core can wait for more of
// them there; L1 is better where the arithmetic takes longer than memory does.
constexpr bool TO_L2 = HAS_PAIRS;

// Always inlined: gcc takes it for a function without effects, and drops calls of it.
template <bool L2> static INLINE inline void prefetch(const void *p) {
    __builtin_prefetch(p, 0, L2 ? 2 : 3);
}

static INLINE inline void store(float *p, f32x16 v) { store_bits(p, v); }

static INLINE inline f32x16 widen(u16x16 bits) { return (f32x16)(convert<u32x16>(bits) << 16); }
static INLINE inline f32x16 load(const bf16 *p) { return widen(load_bits<u16x16>(p)); }

// The first n (0 to 16) lanes from memory, the others zero.
template <typename T> static inline f32x16 load_first(const T *p, int n) {
    T lanes[16] = {};
    std::memcpy(lanes, p, n * sizeof(T));
    return load(lanes);
}

template <class V> static INLINE inline V load_bits_first(const void *p, int n) {
    if (n == LENGTH<V>) return load_bits<V>(p);
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_loadu_epi32((__mmask16)((1u << n) - 1), p);
#endif
    Element<V> lanes[LENGTH<V>] = {};
    std::memcpy(lanes, p, n * sizeof *lanes);
    return load_bits<V>(lanes);
}

// Stores results that are not read again soon, without loading their cache lines. `p` is aligned to 64 bytes.
// After the last store, `finish_stores_past_caches` makes them visible to other threads.
static inline void store_past_caches(float *p, f32x16 v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, v.low);
    _mm256_stream_ps(p + 8, v.high);
#else
    store(p, v);
#endif
}

static inline void finish_stores_past_caches() {
#if defined(__AVX512F__) || defined(__AVX2__)
    _mm_sfence();
#endif
}

static INLINE inline f32x16 to_floats(u8x16 codes) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)codes));
#elif defined(__AVX2__)
    const __m128i bytes = (__m128i)codes;
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
#else
    const u8x16 zeros{}, low = zip<uint8_t, false>(codes, zeros), high = zip<uint8_t, true>(codes, zeros);
    const auto floats = [](u8x16 words) INLINE { return convert<f32x4>((Vector<int32_t, 4>)words); };
    return {{floats(zip<uint16_t, false>(low, zeros)), floats(zip<uint16_t, true>(low, zeros))},
            {floats(zip<uint16_t, false>(high, zeros)), floats(zip<uint16_t, true>(high, zeros))}};
#endif
}

static inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The values of half floats, whether subnormals are flushed or not.
static inline float from_half(uint32_t bits) {
#if defined(__F16C__)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128((int)bits)));
#else
    const uint32_t exponent = bits >> 10 & 31, size = bits & 0x7fff;
    const float value = exponent ? float_of((size << 13) + (exponent < 31 ? 112 << 23 : 224 << 23))
                                 : (float)size * 0x1p-24f;
    return bits & 0x8000 ? -value : value;
#endif
}
static INLINE inline f32x16 from_halves(u16x16 bits) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    return {_mm256_cvtph_ps((__m128i)bits.low), _mm256_cvtph_ps((__m128i)bits.high)};
#else
    float out[16];
    for (int i = 0; i < 16; i++) out[i] = from_half(bits[i]);
    return load(out);
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
#if defined(__AVX512F__)
static INLINE inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(__AVX2__) && defined(__FMA__)
static INLINE inline __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(__aarch64__)
static INLINE inline f32x4 fma(f32x4 a, f32x4 b, f32x4 c) {
    return (f32x4)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#elif defined(__x86_64__)
typedef Vector<double, 4> Doubles;
static INLINE inline Doubles doubles(f32x4 v) {
    return {_mm_cvtps_pd((__m128)v), _mm_cvtps_pd(_mm_movehl_ps((__m128)v, (__m128)v))};
}

// Rounds to odd: a sum that is not exact gets an odd last bit, so that rounding it again to a float gives
// what one rounding would (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums"). `error`
// is the sum's rounding error, by Knuth's TwoSum.
static __attribute__((noinline)) Doubles round_to_odd(Doubles total, Doubles product, Doubles addend) {
    typedef Vector<int64_t, 4> Bits;
    const Doubles part = total - product, error = (product - (total - part)) + (addend - part);
    const Bits inexact = (Bits)((error > 0) | (error < 0)), even = ((Bits)total & 1) - 1;
    const Bits outwards = (Bits)((error > 0) ^ (total < 0)) & 2;  // 2: the exact sum is larger in size
    return (Doubles)((Bits)total + ((outwards - 1) & inexact & even));
}

// The product is exact in double. The sum is rounded twice, which differs from once only if it lies in the
// middle of two floats, or is too small for a normal float.
static inline f32x4 fma(f32x4 a, f32x4 b, f32x4 c) {
    const Doubles product = doubles(a) * doubles(b), addend = doubles(c);
    Doubles total = product + addend;
    typedef Vector<int32_t, 4> Words;  // halves of the doubles
    const auto lower = (Words)_mm_shuffle_ps((__m128)total.low, (__m128)total.high, 0x88);
    const auto upper = (Words)_mm_shuffle_ps((__m128)total.low, (__m128)total.high, 0xdd);
    const Words size = upper & 0x7fffffff, middle = (lower & 0x1fffffff) == 0x10000000;
    const Words small = (size > 0) & (size < (1023 - 126) << 20);
    if (_mm_movemask_ps((__m128)(middle | small))) total = round_to_odd(total, product, addend);
    return (f32x4)_mm_movelh_ps(_mm_cvtpd_ps((__m128d)total.low), _mm_cvtpd_ps((__m128d)total.high));
}
#else
static INLINE inline f32x4 fma(f32x4 a, f32x4 b, f32x4 c) {
    for (int i = 0; i < 4; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
#endif
template <class Half> static INLINE inline Twice<Half> fma(Twice<Half> a, Twice<Half> b, Twice<Half> c) {
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}

// b for equal numbers, of zeros too, and for NaN.
template <class V> static INLINE inline V max(V a, V b) { return select(a > b, a, b); }

// The sum of the lanes, always by the same tree: 16 -> 8 -> 4 -> 2 -> 1, halves added.
template <class V> static INLINE inline Element<V> sum(V v) {
    if constexpr (LENGTH<V> == 2) return v[0] + v[1];
    else return sum(low_half(v) + high_half(v));
}

// Within each quarter, the sums of a's first and last two lanes, and then those of b's.
static INLINE inline f32x16 add_pairs(f32x16 a, f32x16 b) {
    return zip<double, false>(a, b) + zip<double, true>(a, b);
}

// Whether any lane of a mask is set.
template <class Mask> static INLINE inline bool any(Mask mask) {
    if constexpr (sizeof(Mask) > 16) return any(low_half(mask) | high_half(mask));
    else return ((Vector<int64_t, 2>)mask)[0] | ((Vector<int64_t, 2>)mask)[1];
}

// The largest lane, by the same tree.
template <class V> static INLINE inline Element<V> max_lane(V v) {
    if constexpr (LENGTH<V> == 2) return v[0] > v[1] ? v[0] : v[1];
    else return max_lane(max(low_half(v), high_half(v)));
}

// Rounds to bf16 as `to_bf16` does, in the upper half of each lane; the lower half is undefined. A NaN must
// be `canonical`.
static INLINE inline u32x16 round_upper(f32x16 v) {
    const u32x16 bits = (u32x16)v;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}
static INLINE inline f32x16 canonical(f32x16 v) { return select(v == v, v, splat(__builtin_nanf(""))); }

// For operands of what is rounded later: their NaNs are what the rounding needs.
static INLINE inline f32x16 roundable(f32x16 v) { return HAS_PAIRS ? v : canonical(v); }

// Sixteen floats rounded to bf16, as `to_bf16` rounds one.
static INLINE inline u16x16 narrow(f32x16 v) {
#if defined(__AVX512BF16__)
    // The instruction treats subnormals as zero and keeps the bits of NaNs.
    constexpr int NANS = 0x81, SUBNORMAL = 0x20;
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)v, NANS | SUBNORMAL), 1))
        return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#endif
    const u32x16 bits = round_upper(canonical(v)) >> 16;
#if defined(__AVX512F__)
    return (u16x16)_mm512_cvtepi32_epi16((__m512i)bits);
#else
    return convert<u16x16>(bits);
#endif
}

static INLINE inline void store(bf16 *p, f32x16 v) { store_bits(p, narrow(v)); }

template <typename T> static INLINE inline void store_first(T *p, f32x16 v, int n) {
    T lanes[16];
    store(lanes, v);
    std::memcpy(p, lanes, n * sizeof(T));
}

// Sixteen pairs of bf16: the floats of `a` and then those of `b`. None may be subnormal: the
// instruction flushes them.
static INLINE inline u32x16 narrow_pairs(f32x16 a, f32x16 b) {
#if defined(__AVX512BF16__)
    return (u32x16)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    return concat<u32x16>(narrow(a), narrow(b));
#endif
}

// The elements of sixteen pairs of bf16 as floats.
static INLINE inline f32x16 odd_elements(u32x16 pairs) { return (f32x16)(pairs & 0xffff0000u); }
static INLINE inline f32x16 even_elements(u32x16 pairs) { return (f32x16)(pairs << 16); }

// For x <= 0: x = n ln 2 + r with |r| <= ln 2 / 2; returns exp(r) - 1 (its Taylor series to r^7, error below
// 5e-9), and 2^n in `power`. An x below -87 is taken as -87, so that 2^n is a normal number.
template <class V> static INLINE inline V split_exp(V x, V *power) {
    typedef decltype(x < x) Ints;
    const V zero{}, shift = zero + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    x = select(x < -87.0f, zero - 87.0f, x);
    V shifted = fma(x, zero + 1.44269504f, shift);
    V n = shifted - shift;
    V r = fma(n, zero - 0.693359375f, x);  // ln 2 in two parts, the first exact times n
    r = fma(n, zero + 2.12194440e-4f, r);
    *power = (V)(((Ints)shifted - (Ints)shift + 127) << 23);
    V series = zero + 1.0f / 5040;
    series = fma(series, r, zero + 1.0f / 720);
    series = fma(series, r, zero + 1.0f / 120);
    series = fma(series, r, zero + 1.0f / 24);
    series = fma(series, r, zero + 1.0f / 6);
    series = fma(series, r, zero + 0.5f);
    return fma(series, r * r, r);
}

// exp(x) for x <= 0, exactly 0 below -87; NaN stays NaN.
template <class V> static inline V exp_nonpositive(V x) {
    V power, rest = split_exp(x, &power);
    return select(x < -87.0f, V{}, fma(power, rest, power));
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
