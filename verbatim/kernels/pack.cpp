// Quantization of matrices to 8 or 4 bits, the inverse of unpack.cpp: the codes round((w - low) / scale) of a
// row, then (scale, low) of each of its groups.
//
// `verbatim/quantization/rows.py` has the bit-identical torch version; every step here is one IEEE operation.

#include <cmath>
#include <cstring>
#include <omp.h>

#include "simd.h"
#include "threads.h"

namespace {

using namespace vb;

constexpr int32_t LARGEST = 0x7e800000;  // 2^126, as bits
constexpr float MAGIC = 12582912.0f;     // adding and subtracting it rounds to the nearest integer

static inline int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float of_bits(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Round to a bf16, away from zero, or down.
static inline float away(float x) { return of_bits((bits_of(x) + 0xffff) & (int32_t)0xffff0000); }
static inline float below(float x) {
    return x < 0 ? away(x) : of_bits(bits_of(x) & (int32_t)0xffff0000);
}

static inline void put_head(uint8_t *to, float x) {
    const uint16_t bits = (uint16_t)((uint32_t)bits_of(x) >> 16);
    std::memcpy(to, &bits, sizeof bits);
}

// Maps the bits of a float to an integer of the same order.
static inline int32_t key_of(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

static inline float as_read(float made, const float *) { return made; }
static inline float as_read(float made, const bf16 *) {
    const uint32_t bits = (uint32_t)bits_of(made);
    return of_bits((int32_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u));
}

// Quantizes one group of `size` numbers. Returns false if one of them can't be represented.
template <int BITS, typename T>
static inline bool one_group(uint8_t *codes, uint8_t *head, const T *from, int size, double *wrong,
                             double *all) {
    constexpr float LEVELS = (float)((1 << BITS) - 1);
    float x[128];
    int32_t code[128];
    int32_t most = 0, low_key = 0x7fffffff, high_key = -0x7fffffff - 1;
    for (int i = 0; i < size; i++) x[i] = to_float(from[i]);
    for (int i = 0; i < size; i++) {
        const int32_t bits = bits_of(x[i]), size_of = bits & 0x7fffffff, key = key_of(bits);
        most = most > size_of ? most : size_of;
        low_key = low_key < key ? low_key : key;
        high_key = high_key > key ? high_key : key;
    }
    if (most > LARGEST) return false;
    const float low = below(vb::stored_low(of_bits(key_of(low_key)) + 0.0f));
    const float step = (of_bits(key_of(high_key)) - low) / LEVELS + 0.0f;  // -0 becomes 0
    const float scale = away(vb::stored_scale(step));
    put_head(head, scale);
    put_head(head + 2, low);
    if (scale == 0.0f) {
        for (int i = 0; i < size; i++) code[i] = 0;
    } else {
        for (int i = 0; i < size; i++) {
            const float whole = ((x[i] - low) / scale + MAGIC) - MAGIC;
            code[i] = (int32_t)(whole < LEVELS ? whole : LEVELS);
        }
    }
    if (BITS == 8) {
        for (int i = 0; i < size; i++) codes[i] = (uint8_t)code[i];
    } else {
        const int half = (size + 1) / 2;
        if (size % 2) code[size] = 0;
        for (int i = 0; i < half; i++) codes[i] = (uint8_t)(code[i] | (code[i + half] << 4));
    }
    double off[8] = {}, own[8] = {};
    for (int i = 0; i < size; i++) {
        const double w = x[i], d = (double)as_read(low + scale * (float)code[i], from) - w;
        off[i % 8] += d * d;
        own[i % 8] += w * w;
    }
    for (int i = 0; i < 8; i++) *wrong += off[i], *all += own[i];
    return true;
}

template <int BITS, typename T>
static bool rows_of(uint8_t *out, const T *from, int64_t rows, int64_t depth, int group,
                    double *squares, int threads) {
    const int64_t code_bytes = (depth * BITS + 7) / 8, whole = depth / group;
    const int64_t row_bytes = code_bytes + (depth + group - 1) / group * 4;
    const int rest = (int)(depth % group);
    double wrong = 0, all = 0;
    bool good = true;
#pragma omp parallel for schedule(static) num_threads(threads_at_once(threads)) \
    reduction(+ : wrong, all) reduction(&& : good)
    for (int64_t r = 0; r < rows; r++) {
        uint8_t *codes = out + r * row_bytes, *heads = codes + code_bytes;
        const T *x = from + r * depth;
        for (int64_t g = 0; g < whole; g++) {
            good = one_group<BITS>(codes, heads, x, group, &wrong, &all) && good;
            codes += group * BITS / 8, heads += 4, x += group;
        }
        if (rest) good = one_group<BITS>(codes, heads, x, rest, &wrong, &all) && good;
    }
    squares[0] = wrong, squares[1] = all;
    return good;
}

template <typename T>
static bool pack(uint8_t *out, const T *from, int64_t rows, int64_t depth, int bits, int group,
                 double *squares, int threads) {
    return bits == 8 ? rows_of<8>(out, from, rows, depth, group, squares, threads)
                     : rows_of<4>(out, from, rows, depth, group, squares, threads);
}

}  // namespace

// `squares`: sums of (dequantized w - w)^2 and of w^2. Returns 0 if a number is NaN, infinite or too large.
extern "C" int vb_pack_rows(uint8_t *out, const void *from, int64_t rows, int64_t depth, int bits,
                            int group, int is_bf16, double *squares, int threads) {
    return is_bf16 ? pack(out, (const bf16 *)from, rows, depth, bits, group, squares, threads)
                   : pack(out, (const float *)from, rows, depth, bits, group, squares, threads);
}
