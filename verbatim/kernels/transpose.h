// Transposition of w[K, N], as stored by GPT-2 and gpt-oss, to rows of w[N, K], which tiles read (tile.h).
#pragma once

#include "step.h"

namespace {

// A block of SIDE columns by SIDE words along K; a word is a float, or two bf16.
constexpr int SIDE = REGISTER / 4, STAGES = SIDE == 16 ? 4 : SIDE == 8 ? 3 : 2;
typedef uint32_t Words __attribute__((vector_size(4 * SIDE)));
template <typename T> constexpr int64_t BLOCK_DEPTH = SIDE * 4 / sizeof(T);

// Words of neighbouring columns, from the rows of w at `p`.
static INLINE inline Words words_of(const float *p, int64_t) {
    Words words;
    std::memcpy(&words, p, sizeof words);
    return words;
}
static INLINE inline Words words_of(const bf16 *p, int64_t stride) {
#if defined(__AVX512F__)
    const __m256i even = _mm256_loadu_si256((const __m256i *)p);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(even),
                                            _mm256_loadu_si256((const __m256i *)(p + stride)), 1);
    const __m512i first = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i odd_places = _mm512_slli_epi32(_mm512_or_si512(first, _mm512_set1_epi32(16)), 16);
    const __m512i places = _mm512_or_si512(first, odd_places);
    return (Words)_mm512_permutexvar_epi16(places, both);
#elif defined(__AVX2__)
    const __m128i even = _mm_loadu_si128((const __m128i *)p);
    const __m128i odd = _mm_loadu_si128((const __m128i *)(p + stride));
    return (Words)_mm256_set_m128i(_mm_unpackhi_epi16(even, odd), _mm_unpacklo_epi16(even, odd));
#else
    Words words;
    for (int i = 0; i < SIDE; i++) words[i] = p[i] | (uint32_t)p[stride + i] << 16;
    return words;
#endif
}

// Interleaves the words of a and b; returns a vector of the result, from index FROM on.
template <int FROM, int... I>
static INLINE inline Words by_turns(Words a, Words b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, ((FROM + I) / 2 + I % 2 * SIDE)...);
}

// Each stage moves one bit of a word's index from its column number to its row number.
template <typename T>
static NOINLINE void transpose_block(T *out, int64_t out_stride, const T *w, int64_t stride) {
    constexpr auto all = std::make_integer_sequence<int, SIDE>();
    Words v[SIDE];
    each<SIDE>([&](auto i) INLINE { v[i] = words_of(w + i * (4 / (int)sizeof(T)) * stride, stride); });
    each<STAGES>([&](auto) INLINE {
        Words next[SIDE];
        each<SIDE / 2>([&](auto i) INLINE {
            next[2 * i] = by_turns<0>(v[i], v[i + SIDE / 2], all);
            next[2 * i + 1] = by_turns<SIDE>(v[i], v[i + SIDE / 2], all);
        });
        each<SIDE>([&](auto i) INLINE { v[i] = next[i]; });
    });
    each<SIDE>([&](auto i) INLINE { std::memcpy(out + i * out_stride, &v[i], sizeof v[i]); });
}

// Transposes `width` columns of w[depth, N], with rows `stride` apart, to rows `out_stride` apart. Rows are
// prefetched; those after the last one are at `after` with the same stride, unless it is null.
template <typename T>
static void transpose(T *out, int64_t out_stride, const T *w, int64_t stride, int64_t depth,
                      int64_t width, const char *after) {
    constexpr int64_t DEPTH = BLOCK_DEPTH<T>, AHEAD = 64;
    const int64_t bytes = width * (int64_t)sizeof(T), stride_bytes = stride * (int64_t)sizeof(T);
    const int64_t whole = depth / DEPTH * DEPTH, each = (DEPTH * SIDE + width - 1) / width;
    const auto fetch = [&](int64_t row) INLINE {
        const char *at = row < depth ? (const char *)w + row * stride_bytes
                                     : after + (row - depth) * stride_bytes;
        if (row < depth || after)
            for (int64_t b = 0; b < bytes; b += 64) prefetch<false>(at + b);
    };
    for (int64_t k = 0; k < whole; k += DEPTH) {
        int64_t c = 0, ahead = k + AHEAD;
        for (; c + SIDE <= width; c += SIDE) {
            for (int64_t i = 0; i < each; i++) fetch(ahead++);
            transpose_block(out + c * out_stride + k, out_stride, w + k * stride + c, stride);
        }
        for (; c < width; c++)
            for (int64_t i = k; i < k + DEPTH; i++) out[c * out_stride + i] = w[i * stride + c];
    }
    for (int64_t k = whole; k < depth; k++)
        for (int64_t c = 0; c < width; c++) out[c * out_stride + k] = w[k * stride + c];
}

}  // namespace
