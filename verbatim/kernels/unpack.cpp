// Matrices in 8 or 4 bits, made numbers again: low + scale * code for each group of a contraction.
//
// `verbatim/model/quantize.py` tells how they lie and says the same in torch, bit for bit: the product
// is exact in a float (8 bits times 8), so the sum is rounded once whether it is fused or not.
//
// What is written is read next by matrix products, and is larger than the caches.

#include <algorithm>
#include <omp.h>

#include "simd.h"

#define INLINE __attribute__((always_inline))

namespace {

using namespace vb;

typedef uint8_t u8x16 __attribute__((vector_size(16)));

static inline u8x16 load_codes(const uint8_t *p) {
    u8x16 codes;
    std::memcpy(&codes, p, sizeof codes);
    return codes;
}

static inline f32x16 to_floats(u8x16 codes) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)codes));
#else  // in steps of twice the width: gcc takes a longer one apart, byte by byte
    const u16x16 wide = __builtin_convertvector(codes, u16x16);
    return __builtin_convertvector(__builtin_convertvector(wide, i32x16), f32x16);
#endif
}

// Numbers alone come here, so a NaN needs no care.
static inline u16x16 narrow_number(f32x16 v) {
    const u32x16 bits = (u32x16)v, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
#if defined(__AVX512F__)
    return (u16x16)_mm512_cvtepi32_epi16((__m512i)(rounded >> 16));
#else
    return __builtin_convertvector(rounded >> 16, u16x16);
#endif
}

static inline void put_all(float *p, f32x16 v) { store(p, v); }
static inline void put_all(bf16 *p, f32x16 v) {
    const u16x16 bits = narrow_number(v);
    std::memcpy(p, &bits, sizeof bits);
}

static inline float bf16_at(const uint8_t *p) {
    bf16 x;
    std::memcpy(&x, p, sizeof x);
    return to_float(x);
}

// ---- w[rows, depth], groups along a row: its codes, then (scale, low) of each group ----

template <int BITS, int GROUP, typename T>
static INLINE inline void whole_group(T *out, const uint8_t *codes, float scale, float low) {
    const f32x16 s = splat(scale), l = splat(low);
    if (BITS == 8) {
        for (int i = 0; i < GROUP; i += 16)
            put_all(out + i, fma(s, to_floats(load_codes(codes + i)), l));
    } else {
        for (int i = 0; i < GROUP / 2; i += 16) {
            const u8x16 both = load_codes(codes + i);
            put_all(out + i, fma(s, to_floats(both & 15), l));
            put_all(out + i + GROUP / 2, fma(s, to_floats(both >> 4), l));
        }
    }
}

template <int BITS, typename T>
static inline void short_group(T *out, const uint8_t *codes, int size, float scale, float low) {
    const int half = (size + 1) / 2;
    for (int i = 0; i < size; i++) {
        const int code = BITS == 8 ? codes[i] : i < half ? codes[i] & 15 : codes[i - half] >> 4;
        put(out + i, low + scale * (float)code);
    }
}

template <int BITS, int GROUP, typename T>
static void rows_of(T *out, const uint8_t *packed, int64_t rows, int64_t depth, int threads) {
    const int64_t code_bytes = (depth * BITS + 7) / 8, whole = depth / GROUP;
    const int64_t row_bytes = code_bytes + (depth + GROUP - 1) / GROUP * 4;
    const int rest = (int)(depth % GROUP);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *codes = packed + r * row_bytes, *heads = codes + code_bytes;
        T *to = out + r * depth;
        for (int64_t g = 0; g < whole; g++) {
            __builtin_prefetch(codes + row_bytes);
            whole_group<BITS, GROUP>(to, codes, bf16_at(heads), bf16_at(heads + 2));
            codes += GROUP * BITS / 8, heads += 4, to += GROUP;
        }
        if (rest) short_group<BITS>(to, codes, rest, bf16_at(heads), bf16_at(heads + 2));
    }
}

// ---- w[depth, cols], groups down a column: scales, lows, then codes, group by group ----

constexpr int64_t STRIP = 512;  // columns whose heads stay in the first cache

template <int BITS, typename T>
static void strip(T *out, const uint8_t *group, int size, int64_t cols, int64_t begin,
                  int64_t end) {
    const uint8_t *scales = group + begin * 2, *lows = scales + cols * 2;
    const uint8_t *codes = group + cols * 4;
    const int half = (size + 1) / 2;
    const int64_t width = end - begin;
    float s[STRIP], l[STRIP];
    for (int64_t c = 0; c < width; c++)
        s[c] = bf16_at(scales + c * 2), l[c] = bf16_at(lows + c * 2);
    for (int i = 0; i < size; i++) {
        const bool upper = BITS == 4 && i >= half;
        const uint8_t *from = codes + (upper ? i - half : i) * cols + begin;
        T *to = out + i * cols + begin;
        int64_t c = 0;
        for (; c + 16 <= width; c += 16) {
            u8x16 code = load_codes(from + c);
            if (BITS == 4) code = upper ? code >> 4 : code & 15;
            put_all(to + c, fma(load(s + c), to_floats(code), load(l + c)));
        }
        for (; c < width; c++) {
            const int code = BITS == 8 ? from[c] : upper ? from[c] >> 4 : from[c] & 15;
            put(to + c, l[c] + s[c] * (float)code);
        }
    }
}

template <int BITS, typename T>
static void columns_of(T *out, const uint8_t *packed, int64_t batch, int64_t depth, int64_t cols,
                       int group, int threads) {
    const int64_t groups = (depth + group - 1) / group, strips = (cols + STRIP - 1) / STRIP;
    const int64_t group_bytes = cols * (4 + group * BITS / 8);
    const int64_t matrix_bytes = cols * ((depth * BITS + 7) / 8 + groups * 4);
#pragma omp parallel for schedule(static) collapse(3) num_threads(threads)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t g = 0; g < groups; g++)
            for (int64_t n = 0; n < strips; n++)
                strip<BITS>(out + (b * depth + g * group) * cols,
                            packed + b * matrix_bytes + g * group_bytes,
                            (int)std::min<int64_t>(group, depth - g * group), cols, n * STRIP,
                            std::min(cols, (n + 1) * STRIP));
}

// Waking the other threads takes longer than this many numbers.
static int threads_for(int64_t numbers, int threads) {
    if (numbers < (1 << 16)) return 1;
    return threads > 0 ? threads : omp_get_max_threads();
}

template <int BITS, typename T>
static void rows_in(T *out, const uint8_t *packed, int64_t rows, int64_t depth, int group,
                    int threads) {
    if (group == 32) rows_of<BITS, 32>(out, packed, rows, depth, threads);
    else if (group == 64) rows_of<BITS, 64>(out, packed, rows, depth, threads);
    else rows_of<BITS, 128>(out, packed, rows, depth, threads);
}

}  // namespace

// out[rows, depth], bf16 or float. `bits` is 8 or 4, `group` 32, 64 or 128. `threads` 0 takes OpenMP's.
extern "C" void vb_unpack_rows(void *out, const uint8_t *packed, int64_t rows, int64_t depth,
                               int bits, int group, int out_bf16, int threads) {
    threads = threads_for(rows * depth, threads);
    if (bits == 8 && out_bf16) rows_in<8>((bf16 *)out, packed, rows, depth, group, threads);
    else if (bits == 8) rows_in<8>((float *)out, packed, rows, depth, group, threads);
    else if (out_bf16) rows_in<4>((bf16 *)out, packed, rows, depth, group, threads);
    else rows_in<4>((float *)out, packed, rows, depth, group, threads);
}

// out[batch, depth, cols], as above.
extern "C" void vb_unpack_columns(void *out, const uint8_t *packed, int64_t batch, int64_t depth,
                                  int64_t cols, int bits, int group, int out_bf16, int threads) {
    threads = threads_for(batch * depth * cols, threads);
    const auto run = [&](auto *to, auto of) { of(to, packed, batch, depth, cols, group, threads); };
    if (bits == 8 && out_bf16) run((bf16 *)out, columns_of<8, bf16>);
    else if (bits == 8) run((float *)out, columns_of<8, float>);
    else if (out_bf16) run((bf16 *)out, columns_of<4, bf16>);
    else run((float *)out, columns_of<4, float>);
}
