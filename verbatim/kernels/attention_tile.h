// The arithmetic of one tile of keys: scores, softmax weights, weighted values.
//
// A "line" is one query head of one query row. Nothing here lets one line see another: blocking
// over lines only shares loads. Dot products always sum lane by lane over the parts of a row, then
// the 16 lanes by one tree, whether the keys lie as stored (`scores_as_stored`) or transposed
// (`scores_transposed`).
#pragma once

#include "simd.h"

#include <cmath>

#define INLINE inline __attribute__((always_inline))

namespace vb::attention {

constexpr int CHUNK = 16;             // keys that lie together in memory
constexpr int TILE = 64;              // keys between two rescalings, at absolute positions
constexpr int CHUNKS = TILE / CHUNK;
constexpr int UNIT = 32;              // elements of a head that are loaded together

#if defined(__AVX512F__)
constexpr int ACCUMULATORS = 24, KEYS_TOGETHER = 16;  // what fits into the registers
#elif defined(__AVX2__)
constexpr int ACCUMULATORS = 4, KEYS_TOGETHER = 2;
#else
constexpr int ACCUMULATORS = 2, KEYS_TOGETHER = 1;
#endif

// ---- Formats: 32 neighbouring elements become PARTS vectors of 32-bit lanes ----

struct Floats {  // elements 0 to 15, then 16 to 31
    typedef float T;
    static constexpr int PARTS = 2;
    static INLINE f32x16 part(const T *p, int i) { return load(p + 16 * i); }
    static INLINE f32x16 mac(f32x16 q, f32x16 k, f32x16 sum) { return fma(q, k, sum); }
    static int place(int element) { return element; }  // among the lanes of a row
};

struct Halves {  // the even elements, then the odd ones: one instruction each to widen
    typedef bf16 T;
    static constexpr int PARTS = 2;
    static INLINE f32x16 part(const T *p, int i) {
        u32x16 pairs;
        std::memcpy(&pairs, p, sizeof pairs);
        return (f32x16)(i == 0 ? pairs << 16 : pairs & 0xffff0000u);
    }
    static INLINE f32x16 mac(f32x16 q, f32x16 k, f32x16 sum) { return fma(q, k, sum); }
    static int place(int element) {
        return element / UNIT * UNIT + element % 2 * 16 + element % UNIT / 2;
    }
};

#if defined(__AVX512BF16__)
struct Pairs {  // a lane holds an even and an odd element, multiplied and added in one instruction
    typedef bf16 T;
    static constexpr int PARTS = 1;
    static INLINE f32x16 part(const T *p, int) {
        f32x16 pairs;
        std::memcpy(&pairs, p, sizeof pairs);
        return pairs;
    }
    static INLINE f32x16 mac(f32x16 q, f32x16 k, f32x16 sum) {
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)q, (__m512bh)k);
    }
};
#endif

// ---- Scores ----

#define LANES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

// The halves, quarters, pairs and single lanes of two vectors, interleaved: the even ones of both
// in LOW, the odd ones in HIGH. Four such steps turn 16 rows into columns, or sum 16 vectors.
#define LOW8(a, b) LANES(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH8(a, b) LANES(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define LOW4(a, b) LANES(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH4(a, b) LANES(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW2(a, b) LANES(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) LANES(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW1(a, b) LANES(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH1(a, b) LANES(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)

// The lane sums of 16 vectors, each by the tree of `sum`: lane k of the result is sum(v[k]).
static INLINE f32x16 sums(const f32x16 *v) {
    f32x16 a[8], b[4], c[2];
    for (int k = 0; k < 8; k++) a[k] = LOW8(v[k], v[k + 8]) + HIGH8(v[k], v[k + 8]);
    for (int k = 0; k < 4; k++) b[k] = LOW4(a[k], a[k + 4]) + HIGH4(a[k], a[k + 4]);
    for (int k = 0; k < 2; k++) c[k] = LOW2(b[k], b[k + 2]) + HIGH2(b[k], b[k + 2]);
    return LOW1(c[0], c[1]) + HIGH1(c[0], c[1]);
}

// 16 vectors of 16 lanes, rows to columns.
static inline void transpose(f32x16 *v) {
    f32x16 w[16];
    for (int k = 0; k < 8; k++) w[k] = LOW8(v[k], v[k + 8]), w[k + 8] = HIGH8(v[k], v[k + 8]);
    for (int k = 0; k < 16; k++)
        if (k % 8 < 4) v[k] = LOW4(w[k], w[k + 4]), v[k + 4] = HIGH4(w[k], w[k + 4]);
    for (int k = 0; k < 16; k++)
        if (k % 4 < 2) w[k] = LOW2(v[k], v[k + 2]), w[k + 2] = HIGH2(v[k], v[k + 2]);
    for (int k = 0; k < 16; k += 2)
        v[k] = LOW1(w[k], w[k + 1]), v[k + 1] = HIGH1(w[k], w[k + 1]);
}

// Rows of keys and values are whole units wide, and follow each other without gaps. UNITS is that
// width where the compiler may know it, else 0.

// q . k for 16 keys. Bytes that are read soon are prefetched from `ahead` on, `burst` cache lines
// for each that a key has: spread out evenly, for a row of them would hold up the arithmetic.
template <class F, int UNITS>
static inline f32x16 scores_as_stored(const float *q, const typename F::T *k, int width,
                                      const char *ahead, int burst) {
    const int units = UNITS ? UNITS : width, stride = units * UNIT;
    f32x16 acc[CHUNK];
    for (int k0 = 0; k0 < CHUNK; k0 += KEYS_TOGETHER) {
        f32x16 partial[KEYS_TOGETHER] = {};
        for (int u = 0; u < units; u++)
            for (int i = 0; i < F::PARTS; i++) {
                f32x16 lanes = load(q + (u * F::PARTS + i) * 16);
                for (int j = 0; j < KEYS_TOGETHER; j++) {
                    const typename F::T *at = k + (k0 + j) * stride + u * UNIT;
                    partial[j] = F::mac(lanes, F::part(at, i), partial[j]);
                }
                if (k0 == 0 && i < (int)sizeof(typename F::T) / 2)
                    for (int n = 0; n < burst; n++, ahead += 64) __builtin_prefetch(ahead);
            }
        for (int j = 0; j < KEYS_TOGETHER; j++) acc[k0 + j] = partial[j];
    }
    return sums(acc);
}

// 16 keys into columns: lane `l` of part `c` of key `k` goes to columns[(c * 16 + l) * TILE + k].
template <class F>
static inline void columns_of(const typename F::T *k, int units, float *columns) {
    for (int u = 0; u < units; u++)
        for (int i = 0; i < F::PARTS; i++) {
            f32x16 v[CHUNK];
            for (int j = 0; j < CHUNK; j++) v[j] = F::part(k + (j * units + u) * UNIT, i);
            transpose(v);
            float *to = columns + (u * F::PARTS + i) * 16 * TILE;
            for (int l = 0; l < 16; l++) store(to + l * TILE, v[l]);
        }
}

// The tree of `sum` over the lanes FIRST, FIRST + STEP, ...: for L lines and N vectors of 16 keys.
template <class F, int L, int N, int FIRST, int STEP>
static INLINE void add_lanes(const float *q, const float *columns, int parts, f32x16 (*out)[N]) {
    if constexpr (STEP == 16) {
        for (int i = 0; i < L; i++)
            for (int n = 0; n < N; n++) out[i][n] = splat(0.0f);
        for (int c = 0; c < parts; c++) {
            f32x16 keys[N];
            for (int n = 0; n < N; n++) keys[n] = load(columns + (c * 16 + FIRST) * TILE + n * 16);
            for (int i = 0; i < L; i++) {
                f32x16 lane = splat(q[(i * parts + c) * 16 + FIRST]);
                for (int n = 0; n < N; n++) out[i][n] = F::mac(lane, keys[n], out[i][n]);
            }
        }
    } else {
        f32x16 other[L][N];
        add_lanes<F, L, N, FIRST, STEP * 2>(q, columns, parts, out);
        add_lanes<F, L, N, FIRST + STEP, STEP * 2>(q, columns, parts, other);
        for (int i = 0; i < L; i++)
            for (int n = 0; n < N; n++) out[i][n] += other[i][n];
    }
}

// q . k for L lines and N * 16 keys in columns.
template <class F, int UNITS, int L, int N>
static inline void scores_transposed(const float *q, const float *columns, int width,
                                     float *scores) {
    f32x16 out[L][N];
    add_lanes<F, L, N, 0, 1>(q, columns, (UNITS ? UNITS : width) * F::PARTS, out);
    for (int i = 0; i < L; i++)
        for (int n = 0; n < N; n++) store(scores + i * TILE + n * 16, out[i][n]);
}

// ---- Softmax ----

struct Line {
    int64_t row;        // of the flat batch
    int head;           // of the query
    int64_t from, to;   // the keys it sees, [from, to)
    float largest;      // score so far
    float slope;        // ALiBi
    f32x16 total;       // of the weights, by lane
};

// The largest lane, in four steps where `max_lane` takes fifteen.
static INLINE float highest(f32x16 v) {
    v = max(v, LANES(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = max(v, LANES(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = max(v, LANES(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = max(v, LANES(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}

// Turns a tile's dot products into weights and returns the factor for everything before them.
static inline float weigh(Line &line, int64_t first_key, float scale, float cap, float *scores) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int from = (int)(line.from > first_key ? line.from - first_key : 0);
    const int to = (int)(line.to < first_key + TILE ? line.to - first_key : TILE);
    f32x16 s[CHUNKS];
    for (int c = 0; c < CHUNKS; c++) {
        i32x16 key = lanes + c * CHUNK;
        s[c] = load(scores + c * CHUNK) * scale;
        if (cap > 0) s[c] = cap * tanh(s[c] / cap);
        if (line.slope != 0) {
            int behind = (int)(line.to - 1 - first_key);
            s[c] = fma(splat(line.slope), __builtin_convertvector(key - behind, f32x16), s[c]);
        }
        s[c] = (key >= from) & (key < to) ? s[c] : splat(-INFINITY);
    }
    float largest = highest(max(max(s[0], s[1]), max(s[2], s[3])));
    if (!(largest > line.largest)) largest = line.largest;
    f32x16 factor = exp_nonpositive(splat(line.largest - largest));
    line.largest = largest;
    line.total = line.total * factor;
    for (int c = 0; c < CHUNKS; c++) {
        s[c] = exp_nonpositive(s[c] - largest);
        line.total += s[c];
        store(scores + c * CHUNK, s[c]);
    }
    return factor[0];
}

// ---- Values ----

// acc += weight * value for the keys [from, to) of a tile in ascending order, for L lines and
// U units of the value's width. `v` are the values of each chunk; `ahead` is prefetched, or NULL.
template <class F, int UNITS, int L, int U>
static inline void add_values(const float *weights, const typename F::T *const *v, int width,
                              int from, int to, float *acc, const typename F::T *const *ahead) {
    const int stride = (UNITS ? UNITS : width) * UNIT;  // of the values, and of `acc`
    f32x16 sum[L][2 * U];
    for (int i = 0; i < L; i++)
        for (int n = 0; n < 2 * U; n++) sum[i][n] = load(acc + i * stride + n * 16);
    while (from < to) {
        const int chunk = from / CHUNK, end = to < (chunk + 1) * CHUNK ? to : (chunk + 1) * CHUNK;
        const typename F::T *value = v[chunk] + (from % CHUNK) * stride;
        const char *line = ahead ? (const char *)(ahead[chunk] + (from % CHUNK) * stride) : nullptr;
        for (; from < end; from++, value += stride) {
            if (ahead)
                for (int n = 0; n < stride * (int)sizeof(typename F::T); n += 64, line += 64)
                    __builtin_prefetch(line);
            for (int n = 0; n < 2 * U; n++) {
                f32x16 x = F::part(value + n / 2 * UNIT, n % 2);
                for (int i = 0; i < L; i++)
                    sum[i][n] = fma(splat(weights[i * TILE + from]), x, sum[i][n]);
            }
        }
    }
    for (int i = 0; i < L; i++)
        for (int n = 0; n < 2 * U; n++) store(acc + i * stride + n * 16, sum[i][n]);
}

}  // namespace vb::attention
