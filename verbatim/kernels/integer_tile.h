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

static INLINE inline i32x16 low_codes(i32x16 words) { return words & 0x0f0f0f0f; }
static INLINE inline i32x16 high_codes(i32x16 words) { return (words >> 4) & 0x0f0f0f0f; }

#if defined(__AVX512BW__) || defined(__AVX2__)
// `by` times the products of codes below 16: the sum of two of them must fit 16 bits.
static INLINE inline i32x16 dots(i32x16 w, int32_t x, int16_t by) {
#if defined(__AVX512BW__)
    const __m512i two = _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x));
    return (i32x16)_mm512_madd_epi16(two, _mm512_set1_epi16(by));
#else
    const auto half = [=](auto w) INLINE {
        const __m256i two = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x));
        return (decltype(w))_mm256_madd_epi16(two, _mm256_set1_epi16(by));
    };
    return {half(w.low), half(w.high)};
#endif
}
#endif
template <bool FEW, bool VNNI> static INLINE inline i32x16 dot4(i32x16 acc, i32x16 w, int32_t x) {
#if defined(__AVX512BW__)
    if constexpr (VNNI) {
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(_mm512_set1_epi32(x)));
        return acc;
    }
#endif
#if defined(__AVX512BW__) || defined(__AVX2__)
    if (FEW) return acc + dots(w, x, 1);
    return acc + dots(low_codes(w), x, 1) + dots(high_codes(w), x, 16);
#else
    for (int i = 0; i < 4; i++) acc += ((w >> (8 * i)) & 255) * (int32_t)(int8_t)(x >> (8 * i));
    return acc;
#endif
}
static INLINE inline f32x16 add_group(f32x16 total, i32x16 dots, i32x16 head, const GroupHead &own) {
    const f32x16 scale = even_elements((u32x16)head), low = odd_elements((u32x16)head);
    return total + splat(own.scale) * (scale * convert<f32x16>(dots) + low * splat(own.sum));
}

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
                                  f32x16 (*kept)[BLOCK_VECTORS]) {
    constexpr int C = BLOCK_VECTORS;
    constexpr bool L2 = TO_L2 && (BITS == 8 || R > 1);
    const auto fetch = [](const char *at) INLINE {
        if (COLD) each<C>([&](auto c) INLINE { prefetch<L2>(at + AHEAD_BYTES + 64 * c); });
    };
    const int8_t *codes = x.codes + row * x.stride + begin * layout.group;
    const GroupHead *heads = x.heads + row * x.groups + begin;
    f32x16 total[R][C];
    each<R>([&](auto r) INLINE {
        each<C>([&](auto c) INLINE { total[r][c] = begin ? kept[r][c] : f32x16{}; });
    });
    for (int64_t g = begin; g < end; g++) {
        const char *head = w;
        fetch(w);
        w += WORD_BYTES;
        i32x16 dots[R][C] = {};
        const int8_t *at = codes;
        const int64_t words = g + 1 < layout.groups ? layout.words : layout.rest;
        for (const char *stop = w + words * WORD_BYTES; w < stop; w += WORD_BYTES) {
            i32x16 word[C];
            each<C>([&](auto c) INLINE { word[c] = load_bits<i32x16>(w + 64 * c); });
            fetch(w);
            const auto step = [&](i32x16 (&part)[C]) INLINE {
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
                i32x16 half[C];
                each<C>([&](auto c) INLINE { half[c] = low_codes(word[c]); });
                step(half);
                each<C>([&](auto c) INLINE { half[c] = high_codes(word[c]); });
                step(half);
            }
        }
        each<C>([&](auto c) INLINE {
            const i32x16 both = load_bits<i32x16>(head + 64 * c);
            each<R>([&](auto r) INLINE {
                total[r][c] = add_group(total[r][c], dots[r][c], both, heads[r * x.groups]);
            });
        });
        codes += layout.group, heads++;
    }
    each<R>([&](auto r) INLINE { each<C>([&](auto c) INLINE { kept[r][c] = total[r][c]; }); });
}

}  // namespace
