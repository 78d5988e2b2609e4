// A tile of an integer product: a few rows times a block of 32 columns.
//
// A block is stored group by group: the heads of its columns, one word (scale, low) each, then its codes, one
// word of each column at a time. A word has four neighbours along K at 8 bits, or eight at 4 bits, with the
// last four in the upper halves of the bytes.
#pragma once

#include "step.h"
#include "integer_rows.h"

#include <cstdlib>

namespace {

constexpr int BLOCK_COLS = 32, BLOCK_VECTORS = BLOCK_COLS / 16;
constexpr int WORD_BYTES = 4 * BLOCK_COLS;  // one word per column
constexpr int64_t AHEAD_BYTES = 4096;       // distance of prefetching from memory

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8;  // 16 integer sums, 2 weights and a row fit 32 registers
#else
constexpr int TILE_ROWS = 2;
#endif

// Calls f with a constant: whether to use VNNI. VERBATIM_NO_VNNI disables it, for tests.
template <typename F> static inline void with_vnni(F f) {
#if defined(__AVX512VNNI__)
    f(std::true_type());
#elif defined(__AVX512BW__)
    static const bool there =
        __builtin_cpu_supports("avx512vnni") && !std::getenv("VERBATIM_NO_VNNI");
    there ? f(std::true_type()) : f(std::false_type());
#else
    f(std::false_type());
#endif
}

// ---- words of sixteen columns ----
// dot4: acc + the products of four codes of each column with the same four of a row. FEW: the weights' codes
// are below 16. VNNI: uses its instruction. add_group: total + a group's contribution, by integer.h's
// formula.

#if defined(__AVX2__) && !defined(__AVX512F__)
struct Words {  // like Lanes: two registers
    __m256i half[2];
};
static INLINE inline Words words_at(const char *p) {
    return {{_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))}};
}
template <typename F> static INLINE inline Words each_half(F f) { return {{f(0), f(1)}}; }
static INLINE inline Words low_codes(const Words &w) {
    const __m256i mask = _mm256_set1_epi8(15);
    return each_half([&](int i) INLINE { return _mm256_and_si256(w.half[i], mask); });
}
static INLINE inline Words high_codes(const Words &w) {
    const __m256i mask = _mm256_set1_epi8(15);
    return each_half([&](int i) INLINE {
        return _mm256_and_si256(_mm256_srli_epi32(w.half[i], 4), mask);
    });
}
// The sum of two products must fit 16 bits, so 8-bit codes are split into halves.
template <bool FEW, bool> static INLINE inline Words dot4(const Words &acc, const Words &w, int32_t x) {
    const __m256i codes = _mm256_set1_epi32(x), one = _mm256_set1_epi16(1);
    const auto dots = [&](const Words &part, __m256i by, int i) INLINE {
        return _mm256_madd_epi16(_mm256_maddubs_epi16(part.half[i], codes), by);
    };
    if (FEW)
        return each_half([&](int i) INLINE {
            return _mm256_add_epi32(acc.half[i], dots(w, one, i));
        });
    const Words low = low_codes(w), high = high_codes(w);
    const __m256i sixteen = _mm256_set1_epi16(16);
    return each_half([&](int i) INLINE {
        return _mm256_add_epi32(_mm256_add_epi32(acc.half[i], dots(low, one, i)),
                                dots(high, sixteen, i));
    });
}
static INLINE inline Lanes add_group(const Lanes &total, const Words &dots, const Words &head,
                                     const GroupHead &own) {
    const __m256 by = _mm256_set1_ps(own.scale), sums = _mm256_set1_ps(own.sum);
    const auto add = [&](__m256 before, int i) INLINE {
        const __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000);
        const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(head.half[i], 16));
        const __m256 low = _mm256_castsi256_ps(_mm256_and_si256(head.half[i], upper));
        const __m256 dot = _mm256_cvtepi32_ps(dots.half[i]);
        const __m256 part = _mm256_add_ps(_mm256_mul_ps(scale, dot), _mm256_mul_ps(low, sums));
        return _mm256_add_ps(before, _mm256_mul_ps(by, part));
    };
    return {add(total.low, 0), add(total.high, 1)};
}
#else
typedef i32x16 Words;
#if defined(__AVX512BW__)
// Without VNNI, the sum of two products must fit 16 bits, so 8-bit codes are split into halves.
template <bool FEW, bool VNNI> static INLINE inline i32x16 dot4(i32x16 acc, i32x16 w, int32_t x) {
    if constexpr (VNNI) {
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(_mm512_set1_epi32(x)));
        return acc;
    }
    const auto dots = [&](i32x16 part, int16_t by) INLINE {
        const __m512i two = _mm512_maddubs_epi16((__m512i)part, _mm512_set1_epi32(x));
        return (i32x16)_mm512_madd_epi16(two, _mm512_set1_epi16(by));
    };
    if (FEW) return acc + dots(w, 1);
    return acc + dots(w & 0x0f0f0f0f, 1) + dots((w >> 4) & 0x0f0f0f0f, 16);
}
#else
template <bool FEW, bool> static INLINE inline i32x16 dot4(i32x16 acc, i32x16 w, int32_t x) {
    for (int i = 0; i < 4; i++) acc += ((w >> (8 * i)) & 255) * (int32_t)(int8_t)(x >> (8 * i));
    return acc;
}
#endif
static INLINE inline Words words_at(const char *p) {
    Words v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static INLINE inline Words low_codes(Words w) { return w & 0x0f0f0f0f; }
static INLINE inline Words high_codes(Words w) { return (w >> 4) & 0x0f0f0f0f; }
static INLINE inline Lanes add_group(Lanes total, Words dots, Words head, const GroupHead &own) {
    const f32x16 scale = (f32x16)(head << 16), low = (f32x16)(head & (int32_t)0xffff0000);
    const f32x16 dot = __builtin_convertvector(dots, f32x16);
    return total + splat(own.scale) * (scale * dot + low * splat(own.sum));
}
#endif

static INLINE inline int32_t four_codes(const int8_t *p) {
    int32_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// ---- a tile ----

// Multiplies groups `begin` to `end` of a block, from `w` on, with R rows of `x`. `kept` holds the sums so
// far, unless `begin` is 0, and gets the new ones. COLD: the weights come from memory.
template <int R, int BITS, bool COLD, bool VNNI>
static NOINLINE void integer_tile(const Codes &x, int64_t row, const CodeLayout &layout,
                                  const char *w, int64_t begin, int64_t end,
                                  Lanes (*kept)[BLOCK_VECTORS]) {
    constexpr int C = BLOCK_VECTORS;
    constexpr bool L2 = TO_L2 && (BITS == 8 || R > 1);
    const auto fetch = [](const char *at) INLINE {
        if (COLD) each<C>([&](auto c) INLINE { prefetch<L2>(at + AHEAD_BYTES + 64 * c); });
    };
    const int8_t *codes = x.codes + row * x.stride + begin * layout.group;
    const GroupHead *heads = x.heads + row * x.groups + begin;
    Lanes total[R][C];
    each<R>([&](auto r) INLINE {
        each<C>([&](auto c) INLINE { total[r][c] = begin ? kept[r][c] : Lanes{}; });
    });
    for (int64_t g = begin; g < end; g++) {
        const char *head = w;
        fetch(w);
        w += WORD_BYTES;
        Words dots[R][C] = {};
        const int8_t *at = codes;
        const int64_t words = g + 1 < layout.groups ? layout.words : layout.rest;
        for (const char *stop = w + words * WORD_BYTES; w < stop; w += WORD_BYTES) {
            Words word[C];
            each<C>([&](auto c) INLINE { word[c] = words_at(w + 64 * c); });
            fetch(w);
            const auto step = [&](Words (&part)[C]) INLINE {
                each<R>([&](auto r) INLINE {
                    const int32_t four = four_codes(at + r * x.stride);
                    each<C>([&](auto c) INLINE {
                        dots[r][c] = dot4<BITS == 4, VNNI>(dots[r][c], part[c], four);
                    });
                });
                at += 4;
            };
            if (BITS == 8) step(word);
            else {
                Words half[C];
                each<C>([&](auto c) INLINE { half[c] = low_codes(word[c]); });
                step(half);
                each<C>([&](auto c) INLINE { half[c] = high_codes(word[c]); });
                step(half);
            }
        }
        each<C>([&](auto c) INLINE {
            const Words both = words_at(head + 64 * c);
            each<R>([&](auto r) INLINE {
                total[r][c] = add_group(total[r][c], dots[r][c], both, heads[r * x.groups]);
            });
        });
        codes += layout.group, heads++;
    }
    each<R>([&](auto r) INLINE { each<C>([&](auto c) INLINE { kept[r][c] = total[r][c]; }); });
}

}  // namespace
