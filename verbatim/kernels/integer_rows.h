// Rows of activations as codes of eight bits, group by group.
#pragma once

#include <algorithm>

#include "simd.h"

#define INLINE __attribute__((always_inline))

namespace {

using namespace vb;

typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef int16_t i16x16 __attribute__((vector_size(32)));

constexpr int32_t SMALLEST = (127 - 100) << 23, INFINITE = 0x7f800000;  // 2^-100, as bits
constexpr float ROUNDER = 12582912.0f;  // added and taken away, it rounds to the nearest whole number

struct GroupHead {
    float scale, sum;  // xs, and S
};

// How the codes of a row lie: as the words of a weight want them, the last group filled up with zeros.
struct CodeLayout {
    int64_t depth, groups, stride;
    int group, rest;  // rest: words of the last group
    int per_word;     // codes of a weight's word: 4 or 8
    CodeLayout(int64_t depth, int group, int bits)
        : depth(depth), groups((depth + group - 1) / group), group(group), per_word(32 / bits) {
        rest = (int)((depth - (groups - 1) * group + per_word - 1) / per_word);
        // rows that are a power of two apart would share few places of the cache
        stride = (groups * group + 127) / 128 * 128 + 64;
    }
    int words(int64_t g) const { return g + 1 < groups ? group / per_word : rest; }
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
    const i16x16 half = __builtin_convertvector(codes, i16x16);
    const i8x16 narrow = __builtin_convertvector(half, i8x16);
    std::memcpy(to, &narrow, sizeof narrow);
#endif
}

// One group of `size` numbers, 128 at most; whole sixteens of codes are written.
template <typename T>
static INLINE inline GroupHead group_codes(int8_t *codes, const T *x, int size) {
    const int vectors = (size + 15) / 16;
    const auto at = [&](int i) INLINE {
        return 16 * i + 16 <= size ? load(x + 16 * i) : load_first(x + 16 * i, size - 16 * i);
    };
    i32x16 most = {};
    for (int i = 0; i < vectors; i++) {  // as whole numbers, a NaN is the largest
        const i32x16 bits = (i32x16)at(i) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    int32_t lanes[16], largest = 0;
    std::memcpy(lanes, &most, sizeof lanes);
    for (int32_t lane : lanes) largest = std::max(largest, lane);
    float peak;
    std::memcpy(&peak, &largest, sizeof peak);
    if (largest < SMALLEST || largest >= INFINITE) {
        std::memset(codes, 0, 16 * vectors);
        return {largest < SMALLEST ? 0.0f : __builtin_nanf(""), 0.0f};
    }
    const f32x16 by = splat(127.0f / peak), rounder = splat(ROUNDER);
    i32x16 sums = {};
    for (int i = 0; i < vectors; i++) {
        const i32x16 whole = (i32x16)(at(i) * by + rounder) - (i32x16)rounder;
        put_codes(codes + 16 * i, whole);
        sums += whole;
    }
    std::memcpy(lanes, &sums, sizeof lanes);
    int32_t sum = 0;
    for (int32_t lane : lanes) sum += lane;
    return {peak / 127.0f, (float)sum};
}

template <typename T>
static void row_codes(int8_t *codes, GroupHead *heads, const T *x, const CodeLayout &layout) {
    std::memset(codes + (layout.groups - 1) * layout.group, 0,
                layout.stride - (layout.groups - 1) * layout.group);
    for (int64_t g = 0; g < layout.groups; g++) {
        const int64_t at = g * layout.group;
        heads[g] = group_codes(codes + at, x + at,
                               (int)std::min<int64_t>(layout.group, layout.depth - at));
    }
}

}  // namespace
