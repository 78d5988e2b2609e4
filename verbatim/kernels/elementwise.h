// Elementwise operations between a layer's matrix products, one row at a time.
//
// T is the type of stored values, float or bf16. Arithmetic is in float, and rounded to T wherever
// transformers' own layers round, so that a fused layer is bit-identical to its separate modules. A row's
// bits depend on that row alone: sums run in sixteen lanes, k ascending, and the tail is padded with zeros.
// An output may overwrite its input.
#pragma once

#include <cmath>

#include "scratch.h"
#include "simd.h"
#include "threads.h"

namespace vb {

// Kinds of norms, by their rounding of x * inv * weight.
enum NormKind : int32_t {
    NONE = 0,      // no norm at all
    BARE = 1,      // no weight: round(x * inv)
    ROUNDED = 2,   // Llama, Qwen: round(weight * round(x * inv))
    WIDE = 3,      // Olmo 2, GPT-OSS: round(weight * (x * inv))
    ONE_PLUS = 4,  // Gemma: round((x * inv) * (1 + weight))
    ONE_PLUS_ROUNDED = 5,  // Muse Spark: round((x * inv) * round(1 + weight))
    SCALED_FIRST = 6,      // Muse Spark's experts: BARE of round(x * round(1 + weight))
    // LayerNorms, of x minus its mean:
    CENTERED = 7,           // round(weight * (x * inv) + bias), each optional
    CENTERED_ONE_PLUS = 8,  // Nemotron: round((x * inv) * round(1 + weight) + bias)
};

struct Norm {
    const void *weight;  // [width] in T, or null
    int64_t width;
    float eps;
    int32_t kind;
    const void *bias;  // [width] in T, or null
};

enum Activation : int32_t {
    SILU = 0,
    GELU_TANH = 1,
    SIGMOID_OF = 2,
    EXP_OF = 3,
    SOFTPLUS_OF = 4,
    GELU = 5,
    RELU = 6,
    RELU_SQUARED = 7,
};

enum Rotation : int32_t {
    UNTURNED = 0,
    HALVES = 1,      // rotates dimensions i and i + half
    NEIGHBOURS = 2,  // rotates dimensions 2i and 2i + 1, by angle i
    ONCE = 3,        // as HALVES, with one angle per pair instead of two
    SPREAD = 4,      // rotates dimensions 2i and 2i + 1, which become i and i + half
    PAIRED = 5,      // as NEIGHBOURS, by angles 2i and 2i + 1, rounded once
    NEIGHBOURS_ONCE = 6,  // as NEIGHBOURS, with one angle per pair
    BACKWARDS = 7,        // as HALVES, by negative angles
};
constexpr int64_t MOST_SPREAD = 512;  // dimensions

// Rounds to the nearest values of T.
template <typename T> static inline f32x16 rounded(f32x16 v) { return v; }
template <> inline f32x16 rounded<bf16>(f32x16 v) { return widen(narrow(v)); }

// Writes a row: out[k..k+15] = f(at) for k = 0, 16, .., where at(p) loads sixteen values from p[k] on.
template <typename T, typename F> static inline void each_lane(T *out, int64_t width, F f) {
    int64_t k = 0;
    for (; k + 16 <= width; k += 16)
        store(out + k, f([k](const auto *p) { return load(p + k); }));
    if (const int rest = (int)(width - k))
        store_first(out + k, f([k, rest](const auto *p) { return load_first(p + k, rest); }), rest);
}

// Accumulates total = f(total, x) over a row, lane by lane, and returns the sum of the lanes.
template <typename T, typename F> static inline float sum_of(const T *x, int64_t width, F f) {
    f32x16 total = {};
    int64_t k = 0;
    for (; k + 16 <= width; k += 16) total = f(total, load(x + k));
    if (const int rest = (int)(width - k)) {
        float before[16], lanes[16];
        store(before, total);
        store(lanes, f(total, load_first(x + k, rest)));
        std::memcpy(before, lanes, rest * sizeof(float));
        total = load(before);
    }
    return sum(total);
}

template <typename T> static inline void norm_row(T *out, const T *x, const Norm &norm) {
    const T *w = (const T *)norm.weight, *b = (const T *)norm.bias;
    if (norm.kind == SCALED_FIRST) {
        each_lane(out, norm.width, [=](auto at) { return at(x) * rounded<T>(1.0f + at(w)); });
        return norm_row(out, out, Norm{nullptr, norm.width, norm.eps, BARE});
    }
    const float width = (float)norm.width;
    const auto add = [](f32x16 total, f32x16 v) { return total + v; };
    const float mean = norm.kind >= CENTERED ? sum_of(x, norm.width, add) / width : 0.0f;
    const auto square = [=](f32x16 total, f32x16 v) { return fma(v - mean, v - mean, total); };
    const f32x16 inv = splat(1.0f / sqrtf(sum_of(x, norm.width, square) / width + norm.eps));
    const auto write = [=](auto weighted) {
        const auto normed = [=](auto at) { return weighted(at, (at(x) - mean) * inv); };
        if (!b) each_lane(out, norm.width, normed);
        else each_lane(out, norm.width, [=](auto at) { return normed(at) + at(b); });
    };
    switch (norm.kind) {
    case BARE: return write([](auto, f32x16 y) { return y; });
    case ROUNDED: return write([=](auto at, f32x16 y) { return at(w) * rounded<T>(y); });
    case WIDE: return write([=](auto at, f32x16 y) { return at(w) * y; });
    case ONE_PLUS: return write([=](auto at, f32x16 y) { return y * (1.0f + at(w)); });
    case CENTERED:
        if (!w) return write([](auto, f32x16 y) { return y; });
        return write([=](auto at, f32x16 y) { return at(w) * y; });
    case ONE_PLUS_ROUNDED:
    case CENTERED_ONE_PLUS:
        return write([=](auto at, f32x16 y) { return y * rounded<T>(1.0f + at(w)); });
    }
}

// x / (1 + exp(-x)), with an exponential that never overflows.
static inline f32x16 silu(f32x16 x) {
    f32x16 e = exp_nonpositive(select(x > 0.0f, -x, x));
    return select(x > 0.0f, x, x * e) / (1.0f + e);
}

// 1 / (1 + exp(-x)).
static inline f32x16 sigmoid(f32x16 x) {
    f32x16 e = exp_nonpositive(select(x > 0.0f, -x, x));
    return select(x > 0.0f, splat(1.0f), e) / (1.0f + e);
}

// exp(x); infinite above 87.
static inline f32x16 exponential(f32x16 x) {
    f32x16 e = exp_nonpositive(select(x > 0.0f, -x, x));
    return select(x > 0.0f, 1.0f / e, e);
}

// log(1 + exp(x)) = max(x, 0) + log(1 + e) with e = exp(-|x|). With s = e / (2 + e), at most 1/3, log(1 + e)
// = 2 (s + s^3 / 3 + s^5 / 5 + ...); the terms after s^15 are less than 3e-9.
static inline f32x16 softplus(f32x16 x) {
    const f32x16 e = exp_nonpositive(select(x > 0.0f, -x, x)), s = e / (2.0f + e), square = s * s;
    f32x16 series = splat(1.0f / 15);
    for (int n = 13; n > 1; n -= 2) series = fma(series, square, splat(1.0f / (float)n));
    return select(x > 0.0f, x, splat(0.0f)) + 2.0f * fma(series * square, s, s);
}

static inline f32x16 gelu_tanh(f32x16 x) {
    f32x16 inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (1.0f + tanh(inner));
}

// x times the Gaussian distribution function, by 7.1.26 of Abramowitz and Stegun: the function of -|x| is
// polynomial(t) * exp(-x^2 / 2) / 2 with t = 1 / (1 + 0.3275911 |x| / sqrt(2)), with an error below 8e-8.
static inline f32x16 gelu(f32x16 x) {
    const f32x16 size = select(x > 0.0f, x, -x), t = 1.0f / (1.0f + 0.2316418952842616f * size);
    f32x16 polynomial = splat(1.061405429f);
    for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
        polynomial = fma(polynomial, t, splat(c));
    const f32x16 below = 0.5f * (polynomial * t) * exp_nonpositive(-0.5f * (x * x));
    return x * select(x > 0.0f, 1.0f - below, below);
}

static inline f32x16 relu(f32x16 x) { return select(x <= 0.0f, splat(0.0f), x); }

// out = act(gate), times `up` unless that is null.
template <typename T>
static inline void activate_row(T *out, const T *gate, const T *up, int64_t width, int activation) {
    auto row = [=](auto function) {
        if (!up) each_lane(out, width, [=](auto at) { return function(at(gate)); });
        else
            each_lane(out, width,
                      [=](auto at) { return rounded<T>(function(at(gate))) * at(up); });
    };
    if (activation == SILU) row([](f32x16 x) { return silu(x); });
    else if (activation == SIGMOID_OF) row([](f32x16 x) { return sigmoid(x); });
    else if (activation == EXP_OF) row([](f32x16 x) { return exponential(x); });
    else if (activation == SOFTPLUS_OF) row([](f32x16 x) { return softplus(x); });
    else if (activation == GELU) row([](f32x16 x) { return gelu(x); });
    else if (activation == RELU) row([](f32x16 x) { return relu(x); });
    else if (activation == RELU_SQUARED)
        row([](f32x16 x) { return relu(x) * relu(x); });
    else row([](f32x16 x) { return gelu_tanh(x); });
}

// out = residual + x, or residual + round(x * scale).
template <typename T>
static inline void add_row(T *out, const T *residual, const T *x, int64_t width, float scale) {
    if (scale == 1.0f)
        return each_lane(out, width, [=](auto at) { return at(residual) + at(x); });
    each_lane(out, width, [=](auto at) { return at(residual) + rounded<T>(at(x) * scale); });
}

// x * cos + turned * sin. As in torch, each operation is rounded with bf16 angles, and only the result with
// float angles.
template <typename A>
static inline f32x16 turn(f32x16 x, f32x16 cos, f32x16 turned, f32x16 sin) {
    return rounded<A>(x * cos) + rounded<A>(turned * sin);
}

// Rotates the first dimensions of one head in place; `angles` is their number.
template <typename T, typename A>
static inline void rotate_head(T *x, const A *cos, const A *sin, int64_t angles, int rotation) {
    const bool once = rotation == ONCE || rotation == NEIGHBOURS_ONCE;
    const int64_t half = once ? angles : angles / 2;
    if (rotation == SPREAD) {
        T pairs[MOST_SPREAD];
        std::memcpy(pairs, x, 2 * half * sizeof(T));
        for (int64_t i = 0; i < half; i++) x[i] = pairs[2 * i], x[i + half] = pairs[2 * i + 1];
    }
    const bool back = rotation == BACKWARDS;
    const int64_t second = rotation == HALVES || back ? half : 0;  // offset of the second half's angles
    auto pairs = [&](auto get, auto set, int64_t p, int64_t q, int64_t i) {
        const f32x16 a = get(x + p), b = get(x + q);
        set(x + p, turn<A>(a, get(cos + i), back ? b : -b, get(sin + i)));
        set(x + q, turn<A>(b, get(cos + second + i), back ? -a : a, get(sin + second + i)));
    };
    auto get_one = [](const auto *p) { return splat(to_float(*p)); };
    auto set_one = [](T *p, f32x16 v) { put(p, v[0]); };
    int64_t i = 0;
    if (rotation == PAIRED) {
        for (; i < angles; i += 2) {
            const f32x16 a = get_one(x + i), b = get_one(x + i + 1);
            set_one(x + i, turn<float>(a, get_one(cos + i), -b, get_one(sin + i)));
            set_one(x + i + 1, turn<float>(b, get_one(cos + i + 1), a, get_one(sin + i + 1)));
        }
        return;
    }
    if (rotation == NEIGHBOURS || rotation == NEIGHBOURS_ONCE) {
        for (; i < half; i++) pairs(get_one, set_one, 2 * i, 2 * i + 1, i);
        return;
    }
    for (; i + 16 <= half; i += 16)
        pairs([](const auto *p) { return load(p); }, [](T *p, f32x16 v) { store(p, v); }, i,
              i + half, i);
    for (; i < half; i++) pairs(get_one, set_one, i, i + half, i);
}

// Calls f(row) for all rows. Few elements are computed by this thread alone: waking the others would take
// longer, unless a team is running.
template <typename F>
static inline void each_row(int64_t rows, int64_t width, int threads, F f) {
    if (rows * width < (Team::mine ? 1 << 13 : 1 << 15)) threads = 1;
    else if (threads <= 0) threads = omp_get_max_threads();
    parallel_for(rows, threads, f);
}

}  // namespace vb
