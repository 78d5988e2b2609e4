// A tile of a product of whole numbers: a few rows by a block of 32 columns.
//
// A block lies group by group: the heads of its columns, a word of (scale, low) each, then its codes, a
// word of each column at a time: four neighbours along K in 8 bits; in 4 bits eight, the later four in the
// upper halves of the bytes.
#pragma once

#include "columns.h"
#include "integer_rows.h"

namespace {

constexpr int BLOCK_COLS = 32, BLOCK_VECTORS = BLOCK_COLS / 16;
constexpr int WORD_BYTES = 4 * BLOCK_COLS;  // a word of each column
constexpr int64_t AHEAD_BYTES = 4096;       // of what comes from memory

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8;  // 16 sums of whole numbers, 2 weights and a row fit 32 registers
#else
constexpr int TILE_ROWS = 2;
#endif

// ---- acc + the products of four codes of each column with the same four of a row ----
// FEW: the weights' codes are below 16.

#if defined(__AVX512VNNI__)
template <bool FEW> static INLINE inline i32x16 dot4(i32x16 acc, i32x16 w, int32_t x) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
}
#elif defined(__AVX2__)
#if defined(__AVX512BW__)
typedef __m512i Lanes;
static INLINE inline Lanes all(int32_t x) { return _mm512_set1_epi32(x); }
static INLINE inline Lanes pairs(Lanes w, Lanes x) { return _mm512_maddubs_epi16(w, x); }
static INLINE inline Lanes fours(Lanes p, int16_t by) {
    return _mm512_madd_epi16(p, _mm512_set1_epi16(by));
}
#else
typedef __m256i Lanes;
static INLINE inline Lanes all(int32_t x) { return _mm256_set1_epi32(x); }
static INLINE inline Lanes pairs(Lanes w, Lanes x) { return _mm256_maddubs_epi16(w, x); }
static INLINE inline Lanes fours(Lanes p, int16_t by) {
    return _mm256_madd_epi16(p, _mm256_set1_epi16(by));
}
#endif
// A pair of products must fit 16 bits, so eight bits go in two halves.
template <bool FEW> static INLINE inline i32x16 dot4(i32x16 acc, i32x16 w, int32_t x) {
    constexpr int COUNT = 64 / sizeof(Lanes);
    const i32x16 low = FEW ? w : w & 0x0f0f0f0f, high = (w >> 4) & 0x0f0f0f0f;
    const auto add = [&](i32x16 part, int16_t by) INLINE {
        Lanes lanes[COUNT];
        std::memcpy(lanes, &part, 64);
        each<COUNT>([&](auto i) INLINE { lanes[i] = fours(pairs(lanes[i], all(x)), by); });
        std::memcpy(&part, lanes, 64);
        acc += part;
    };
    add(low, 1);
    if (!FEW) add(high, 16);
    return acc;
}
#else
template <bool FEW> static INLINE inline i32x16 dot4(i32x16 acc, i32x16 w, int32_t x) {
    for (int i = 0; i < 4; i++) acc += ((w >> (8 * i)) & 255) * (int32_t)(int8_t)(x >> (8 * i));
    return acc;
}
#endif

static INLINE inline i32x16 load_word(const char *p) {
    i32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static INLINE inline int32_t four_codes(const int8_t *p) {
    int32_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// ---- a tile ----

// Groups `begin` to `end` of a block, whose first one lies at `w`, against R rows of `x`. `kept` has the
// sums before, unless `begin` is 0, and gets those after. COLD: the weights come from memory.
template <int R, int BITS, bool COLD>
static NOINLINE void integer_tile(const Codes &x, int64_t row, const CodeLayout &layout,
                                  const char *w, int64_t begin, int64_t end,
                                  f32x16 (*kept)[BLOCK_VECTORS]) {
    constexpr int C = BLOCK_VECTORS;
    const auto fetch = [](const char *at) INLINE {
        if (COLD) each<C>([&](auto c) INLINE { __builtin_prefetch(at + AHEAD_BYTES + 64 * c); });
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
            each<C>([&](auto c) INLINE { word[c] = load_word(w + 64 * c); });
            fetch(w);
            const auto step = [&](i32x16 (&part)[C]) INLINE {
                each<R>([&](auto r) INLINE {
                    const int32_t four = four_codes(at + r * x.stride);
                    each<C>([&](auto c) INLINE {
                        dots[r][c] = dot4<BITS == 4>(dots[r][c], part[c], four);
                    });
                });
                at += 4;
            };
            if (BITS == 8) step(word);
            else {
                i32x16 half[C];
                each<C>([&](auto c) INLINE { half[c] = word[c] & 0x0f0f0f0f; });
                step(half);
                each<C>([&](auto c) INLINE { half[c] = (word[c] >> 4) & 0x0f0f0f0f; });
                step(half);
            }
        }
        each<C>([&](auto c) INLINE {
            const i32x16 both = load_word(head + 64 * c);
            const f32x16 scale = (f32x16)(both << 16), low = (f32x16)(both & (int32_t)0xffff0000);
            each<R>([&](auto r) INLINE {
                const GroupHead &own = heads[r * x.groups];
                const f32x16 dot = __builtin_convertvector(dots[r][c], f32x16);
                total[r][c] += splat(own.scale) * (scale * dot + low * splat(own.sum));
            });
        });
        codes += layout.group, heads++;
    }
    each<R>([&](auto r) INLINE { each<C>([&](auto c) INLINE { kept[r][c] = total[r][c]; }); });
}

}  // namespace
