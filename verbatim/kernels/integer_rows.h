// Quantization of rows of activations to 8-bit codes, group by group.
#pragma once

#include <algorithm>

#include "simd.h"

namespace {

using namespace vb;

constexpr int32_t SMALLEST = (127 - 100) << 23, INFINITE = 0x7f800000;  // 2^-100, as bits
constexpr float ROUNDER = 12582912.0f;  // adding and subtracting it rounds to the nearest integer

struct GroupHead {
    float scale, sum;  // xs, and S
};

// Layout of the codes of a row: it matches the words of weights, with the last group padded with zeros.
struct CodeLayout {
    int64_t depth, groups, stride;
    int group, words, rest;  // words of a weight's group, and of its last group
    CodeLayout(int64_t depth, int group, int bits)
        : depth(depth), groups((depth + group - 1) / group), group(group),
          words(group * bits / 32) {
        rest = (int)(((depth - (groups - 1) * group) * bits + 31) / 32);
        // rows a power of two apart would share few sets of the cache
        stride = (groups * group + 127) / 128 * 128 + 64;
    }
};

struct Codes {
    const int8_t *codes;     // [rows, stride]
    const GroupHead *heads;  // [rows, groups]
    int64_t stride, groups;
};

static inline void put_codes(int8_t *to, i32x16 codes) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)codes));
#else
    store_bits(to, convert<Vector<int8_t, 16>>(convert<Vector<int16_t, 16>>(codes)));
#endif
}

// Quantizes one group of `vectors` vectors of sixteen, the last with `last` elements. Writes whole vectors.
template <typename T>
static INLINE inline GroupHead group_codes(int8_t *codes, const T *x, int vectors, int last) {
    const auto each_vector = [&](auto f) INLINE {
        for (int i = 0; i < vectors - 1; i++) f(i, load(x + 16 * i));
        f(vectors - 1, last == 16 ? load(x + 16 * (vectors - 1))
                                  : load_first(x + 16 * (vectors - 1), last));
    };
    i32x16 most = {};
    each_vector([&](int, f32x16 v) INLINE {  // as integers, NaN is the largest
        const i32x16 bits = (i32x16)v & 0x7fffffff;
        most = max(bits, most);
    });
    const int32_t largest = max_lane(most);
    float peak;
    std::memcpy(&peak, &largest, sizeof peak);
    if (largest < SMALLEST || largest >= INFINITE) {
        std::memset(codes, 0, 16 * vectors);
        return {largest < SMALLEST ? 0.0f : __builtin_nanf(""), 0.0f};
    }
    const f32x16 by = splat(127.0f / peak), rounder = splat(ROUNDER);
    i32x16 sums = {};
    each_vector([&](int i, f32x16 v) INLINE {
        const i32x16 whole = (i32x16)(v * by + rounder) - (i32x16)rounder;
        put_codes(codes + 16 * i, whole);
        sums += whole;
    });
    return {peak / 127.0f, (float)sum(sums)};
}

template <typename T>
static void row_codes(int8_t *codes, GroupHead *heads, const T *x, const CodeLayout &layout) {
    std::memset(codes + (layout.groups - 1) * layout.group, 0,
                layout.stride - (layout.groups - 1) * layout.group);
    for (int64_t g = 0; g < layout.groups; g++, codes += layout.group, x += layout.group) {
        const int size = (int)std::min<int64_t>(layout.group, layout.depth - g * layout.group);
        if (size == 64) heads[g] = group_codes(codes, x, 4, 16);  // unrolled
        else heads[g] = group_codes(codes, x, (size + 15) / 16, (size + 15) % 16 + 1);
    }
}

}  // namespace
