// Rows of logits as the sampler reads them, and their masses: sums of exp(y - max).
//
// Every log-prob is computed from masses, so their bits are fixed by the formulas below alone. The
// exponential uses no fused multiply-add, and id i is always added to lane i % 32: every instruction set, and
// the torch reference, computes the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace vb::sampling {

typedef Vector<double, 8> f64x8;
typedef Vector<int64_t, 8> i64x8;

constexpr float INF = std::numeric_limits<float>::infinity();

static inline float minus_infinity(const float *) { return -INF; }
static inline bf16 minus_infinity(const bf16 *) { return 0xff80; }

// n float32 or bfloat16 logits, unchanged; those past the end read as minus infinity.
template <typename T> struct Plain {
    const T *x;
    int64_t n;

    f32x16 block(int64_t i) const {
        if (i + 16 <= n) return load(x + i);
        T lanes[16];
        for (int j = 0; j < 16; j++) lanes[j] = i + j < n ? x[i + j] : minus_infinity(x);
        return load(lanes);
    }
    f32x16 near(int64_t i) const { return block(i); }
    float one(int64_t i) const { return to_float(x[i]); }
};

// Logits divided by the temperature.
template <typename T> struct Divided {
    Plain<T> plain;
    float temperature, inverse;
    int64_t n;

    Divided(Plain<T> plain, float temperature)
        : plain(plain), temperature(temperature), inverse(1 / temperature), n(plain.n) {}

    f32x16 block(int64_t i) const { return plain.block(i) / splat(temperature); }
    // Within two roundings of `block`, without the division.
    f32x16 near(int64_t i) const { return plain.block(i) * splat(inverse); }
    float one(int64_t i) const { return plain.one(i) / temperature; }
};

// Bit j is set where a[j] >= b[j].
static inline uint32_t at_least(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#elif defined(__AVX2__)
    const auto half = [](__m256 a, __m256 b) { return (uint32_t)_mm256_movemask_ps((__m256)(a >= b)); };
    return half(a.low, b.low) | half(a.high, b.high) << 8;
#else
    uint32_t mask = 0;
    for (int j = 0; j < 16; j++) mask |= (uint32_t)(a[j] >= b[j]) << j;
    return mask;
#endif
}

// The largest logit; NaN if any is NaN.
template <typename View> static float largest(const View &view) {
    f32x16 top[2] = {splat(-INF), splat(-INF)};
    i32x16 ordered = ~i32x16{};
    for (int64_t i = 0; i < view.n; i += 32) {
        f32x16 a = view.block(i), b = i + 16 < view.n ? view.block(i + 16) : splat(-INF);
        ordered &= (a == a) & (b == b);
        top[0] = max(a, top[0]);
        top[1] = max(b, top[1]);
    }
    for (int j = 0; j < 16; j++)
        if (!ordered[j]) return std::numeric_limits<float>::quiet_NaN();
    float lanes[16];
    store(lanes, max(top[0], top[1]));
    return *std::max_element(lanes, lanes + 16);
}

// The lowest id with the logit `value`, the largest of the row.
template <typename View> static int64_t first_of(const View &view, float value) {
    for (int64_t i = 0;; i += 16) {
        uint32_t mask = at_least(view.block(i), splat(value));
        if (mask) return i + __builtin_ctz(mask);
    }
}

static inline void to_double(f32x16 v, f64x8 out[2]) {
#if defined(__AVX512F__)
    out[0] = (f64x8)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
    out[1] = (f64x8)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#else
    out[0] = convert<f64x8>(v.low), out[1] = convert<f64x8>(v.high);
#endif
}

// exp(d) for d <= 0, with a relative error of 3e-9: 2^n * 2^r with a polynomial for 2^r, |r| <= 1/2. Exactly
// 1 at 0, and never below 2^-1000, which adds nothing to a mass of at least 1.
static inline f64x8 exp_falling(f64x8 d) {
    const double ROUND = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
    f64x8 t = d * 1.4426950408889634, least = f64x8{} - 1000.0;
    t = max(t, least);
    f64x8 shifted = t + ROUND, r = t - (shifted - ROUND);
    f64x8 p = r * 0.0001546144469856913 + 0.0013400428177615838;
    p = p * r + 0.009618056678524637;
    p = p * r + 0.05550327226670302;
    p = p * r + 0.24022650922288757;
    p = p * r + 0.6931472067028326;
    p = p * r + 1.0;
    return (f64x8)((i64x8)p + ((i64x8)shifted << 52));
}

static inline double exp_falling(double d) { return exp_falling(f64x8{} + d)[0]; }

// exp(y - max) of 16 logits.
static inline void masses(f32x16 y, double max, f64x8 out[2]) {
    to_double(y, out);
    for (int i = 0; i < 2; i++) out[i] = exp_falling(out[i] - max);
}

// The sum of exp(y - max) over a row.
template <typename View> static double total_mass(const View &view, double max) {
    f64x8 lanes[4] = {};
    for (int64_t i = 0; i < view.n; i += 32) {
        f64x8 e[4];
        masses(view.block(i), max, e);
        masses(i + 16 < view.n ? view.block(i + 16) : splat(-INF), max, e + 2);
        for (int j = 0; j < 4; j++) lanes[j] += e[j];
    }
    double x[32];
    for (int j = 0; j < 4; j++) store_bits(x + 8 * j, lanes[j]);
    for (int width = 16; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

}  // namespace vb::sampling
