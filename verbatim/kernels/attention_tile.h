// The arithmetic of one tile of keys: scores, softmax weights, weighted values.
//
// A "line" is one query head of one query row. No line affects another: sharing a tile only shares loads.
// Scores and outputs are both products of a line and the tile (attention_rows.h): a score is eight chains of
// `mac` along the key, added by a tree, and an element of the output is one chain in the order of the keys.
#pragma once

#include "attention_rows.h"
#include "attention_work.h"

#include <algorithm>
#include <cmath>

namespace vb::attention {

constexpr int SEGMENT = 1024;  // keys of one online softmax; a line's segments are merged in order

constexpr int FEW = 8;  // a tile is not laid out for so few lines

#if defined(__AVX512F__)
constexpr int LINES = 6, VECTORS = 4;  // computed together; limited by registers
#elif defined(__AVX2__)
constexpr int LINES = 2, VECTORS = 2;
#else
constexpr int LINES = 2, VECTORS = 1;
#endif

// ---- Steps of a product ----

// PAIRS: a lane holds two bf16. PARTS: the vectors of floats in which they are multiplied, the odd elements
// first (wide.h).
struct Singles {  // one multiplication in float32
    static constexpr bool PAIRS = false;
    static constexpr int PARTS = 1;
    static INLINE Lanes mac(Lanes a, Lanes b, Lanes sum) { return vb::mac(sum, a, b); }
};

struct Wide : Singles {  // two multiplications in float32
    static constexpr bool PAIRS = true;
    static constexpr int PARTS = 2;
};

#if defined(__AVX512BF16__)
struct Pairs {  // both are multiplied and added in one instruction
    static constexpr bool PAIRS = true;
    static constexpr int PARTS = 1;
    static INLINE f32x16 mac(f32x16 a, f32x16 b, f32x16 sum) {
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
};
#else
typedef Wide Pairs;
#endif

template <class Step> using Flush = FlushSubnormals<Step::PARTS == 2>;

// Part `part` of lanes that hold pairs, or the lanes.
template <class Step> static INLINE Lanes part_of_lanes(Lanes lanes, int part) {
    if (Step::PARTS == 1) return lanes;
    return part == 0 ? odd_elements(lanes) : even_elements(lanes);
}

// The weights of a tile are stored by parts, each with as many weights as there are steps.
template <class Step> constexpr int WEIGHTS = Step::PARTS == 2 ? TILE / 2 : TILE;

// ---- Scores ----

// A dot product is eight chains: for each quarter of a vector, one of the even lanes and one of the odd
// lanes. A tree adds them: even and odd, then neighbouring quarters, then halves. Two keys share a vector
// (`join`), and several sums are added together, so that lanes freed by one sum hold those of another.
#if defined(__AVX512F__)
constexpr int SUMS = 16, MOST_QUERIES = 4;

#define LOW2(a, b) LANES(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) LANES(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN4(a, b) LANES(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD4(a, b) LANES(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)

template <int N> static INLINE void add_quarters(const f32x16 *from, f32x16 *to) {
    for (int i = 0; i < N; i++)
        to[i] = EVEN4(from[2 * i], from[2 * i + 1]) + ODD4(from[2 * i], from[2 * i + 1]);
}

// Writes the two dot products of each sum, in order.
static INLINE void add_chains(const f32x16 *sum, float *dots) {
    f32x16 quarters[8], halves[4], all[2];
    for (int i = 0; i < 8; i++)
        quarters[i] = LOW2(sum[2 * i], sum[2 * i + 1]) + HIGH2(sum[2 * i], sum[2 * i + 1]);
    add_quarters<4>(quarters, halves), add_quarters<2>(halves, all);
    store(dots, all[0]), store(dots + 16, all[1]);
}
#else
constexpr int SUMS = 4, MOST_QUERIES = 2;

static INLINE void add_chains(const Lanes *sum, float *dots) {
    for (int i = 0; i < SUMS; i += 2) {
#if defined(__AVX2__)
        const Lanes pairs = each_half(sum[i], sum[i + 1], [](__m256 a, __m256 b) {
            return _mm256_shuffle_ps(a, b, 0x44) + _mm256_shuffle_ps(a, b, 0xee);
        });
        const auto both_quarters = [](__m256 v) {
            return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        };
        _mm_storeu_ps(dots + 2 * i, _mm_add_ps(both_quarters(pairs.low), both_quarters(pairs.high)));
#else
        f32x4 a[4], b[4];
        std::memcpy(a, &sum[i], sizeof a), std::memcpy(b, &sum[i + 1], sizeof b);
        for (int q = 0; q < 4; q++)
            a[q] = LANES(a[q], b[q], 0, 1, 4, 5) + LANES(a[q], b[q], 2, 3, 6, 7);
        const f32x4 all = (a[0] + a[1]) + (a[2] + a[3]);
        std::memcpy(dots + 2 * i, &all, sizeof all);
#endif
    }
}
#endif

template <int L> constexpr int PAIRS_OF_KEYS = SUMS / L;  // multiplied with L queries at once

template <int L> static INLINE void put_dots(const Lanes *sum, float *scores) {
    constexpr int KEYS = 2 * PAIRS_OF_KEYS<L>;
    float dots[2 * SUMS];
    add_chains(sum, dots);
    for (int l = 0; l < L; l++) std::memcpy(scores + l * TILE, dots + l * KEYS, KEYS * sizeof(float));
}

// Computes the dot products of L queries and the laid out keys [from, to).
template <class Step, int L>
static inline void score_lines(const float *queries, int stride, const float *keys, int from, int to,
                               float *scores) {
    constexpr int P = PAIRS_OF_KEYS<L>;
    for (int k = from; k < to; k += 2 * P) {
        const float *pairs = keys + k / 2 * stride;
        Lanes sum[SUMS];
        for (int n = 0; n < SUMS; n++) sum[n] = spread(0.0f);
        for (int e = 0; e < stride; e += 16) {
            Lanes x[L];
            for (int l = 0; l < L; l++) x[l] = lanes_at(queries + l * stride + e);
            for (int p = 0; p < P; p++) {
                const Lanes y = lanes_at(pairs + p * stride + e);
                for (int l = 0; l < L; l++) sum[l * P + p] = Step::mac(x[l], y, sum[l * P + p]);
            }
        }
        put_dots<L>(sum, scores + k);
    }
}

// The same for a few lines, directly from the rows: laying out a tile would cost more than it saves, as it
// evicts prefetched data from the L1 cache.
template <class Rows, class Step, int L, bool EXACT>
static INLINE void score_rows(const char *const *rows, int width, int from, int to,
                              const float *queries, int stride, float *scores) {
    constexpr int P = PAIRS_OF_KEYS<L>, VECTORS = Rows::PAIRED && !Step::PAIRS ? 4 : 2;
    for (int k = from; k < to; k += 2 * P) {
        Lanes sum[SUMS];
        for (int n = 0; n < SUMS; n++) sum[n] = spread(0.0f);
        const auto add = [&](int i, auto whole) __attribute__((always_inline)) {
            for (int p = 0; p < P; p++) {
                const char *const *pair = rows + k + 2 * p;
                Lanes y[VECTORS];
                fetch<Rows>(pair, width, i), fetch<Rows>(pair + 1, width, i);
                join<Rows, Step::PAIRS, whole.value>(pair, width, i, y);
                for (int n = 0; n < VECTORS * Step::PARTS; n++) {
                    const Lanes keys = part_of_lanes<Step>(y[n / Step::PARTS], n % Step::PARTS);
                    for (int l = 0; l < L; l++) {
                        const Lanes x = lanes_at(queries + l * stride + (i * VECTORS * Step::PARTS + n) * 16);
                        sum[l * P + p] = Step::mac(x, keys, sum[l * P + p]);
                    }
                }
            }
        };
        each_vector<Rows, EXACT>(width, add);
        put_dots<L>(sum, scores + k);
    }
}

template <class Rows, class Step, int L>
static inline void score_few(const char *const *rows, int width, int from, int to,
                             const float *queries, int stride, float *scores) {
    if (width % (Rows::PAIRED ? 32 : 16) == 0)  // a separate instance, else gcc keeps the sums in memory
        score_rows<Rows, Step, L, true>(rows, width, from, to, queries, stride, scores);
    else score_rows<Rows, Step, L, false>(rows, width, from, to, queries, stride, scores);
}

// ---- Softmax ----

// The state of an online softmax, relative to the largest score so far.
struct Softmax {
    f32x16 total;   // sum of the weights, by lane
    float largest;  // largest score
};

struct Line {
    int64_t row;        // of the flat batch
    int head;           // query head
    int64_t from, to;   // the keys it sees, [from, to)
    float slope;        // ALiBi
    Softmax part, all;  // of the current segment, and of those before it
};

// The scores of neighbouring keys, as many as fit in a register, and a tile of them. `sixteen` returns the
// nth sixteen weights of a tile; `pairs_of` the nth 32, rounded to bf16. No weight is subnormal.
#if defined(__AVX2__) && !defined(__AVX512F__)
typedef f32x8 Chunk;
static INLINE Lanes sixteen(const Chunk *s, int n) { return {s[2 * n], s[2 * n + 1]}; }
static INLINE Lanes pairs_of(const Chunk *s, int n) {
    const auto eight = [](const Chunk *s) {
        const auto bits = [](Chunk v) { return (__m256i)bf16_bits<u32x8>(v); };
        return floats(_mm256_permute4x64_epi64(_mm256_packus_epi32(bits(s[0]), bits(s[1])), 0xd8));
    };
    return {eight(s + 4 * n), eight(s + 4 * n + 2)};
}
#else
typedef f32x16 Chunk;
static INLINE Lanes sixteen(const Chunk *s, int n) { return s[n]; }
static INLINE Lanes pairs_of(const Chunk *s, int n) {
#if defined(__AVX512BF16__)
    return (Lanes)narrow_pairs(s[2 * n], s[2 * n + 1]);
#else
    const u16x16 halves[2] = {narrow(s[2 * n]), narrow(s[2 * n + 1])};
    return lanes_from(halves);
#endif
}
#endif
typedef decltype(Chunk{} < Chunk{}) Places;
constexpr int LENGTH = sizeof(Chunk) / sizeof(float), CHUNKS = TILE / LENGTH;

static INLINE Chunk chunk_at(const float *p) {
    Chunk chunk;
    std::memcpy(&chunk, p, sizeof chunk);
    return chunk;
}

// The largest lane, in three or four steps.
static INLINE float highest(f32x8 v) {
    v = max(v, LANES(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = max(v, LANES(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    return max(v, LANES(v, v, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}
static INLINE float highest(f32x16 v) {
    return highest(max(LANES(v, v, 0, 1, 2, 3, 4, 5, 6, 7), LANES(v, v, 8, 9, 10, 11, 12, 13, 14, 15)));
}

// Adds a line's biases to the scores of a tile; its first key is `behind` positions before the line's own.
static inline void add_bias(const Problem &p, const Line &line, int64_t behind, Chunk *scores) {
    const int64_t at = (line.row * p.heads + line.head) * p.bias_size;
    float bias[TILE] = {};
    for (int64_t k = std::max<int64_t>(0, behind - p.bias_size + 1); k < TILE && k <= behind; k++)
        bias[k] = value_at<bf16>(p.bias, !p.q_is_bf16, at + behind - k);
    for (int c = 0; c < CHUNKS; c++) scores[c] += chunk_at(bias + c * LENGTH);
}

// Turns a tile's dot products into weights, and returns the factor for the segment's earlier sums. With PAIRS
// the weights are rounded to bf16, two keys to a lane or in two parts; their total is that of the rounded
// weights, so that the result is a true mean of the values.
template <class Step>
static INLINE float weigh(const Problem &p, Line &line, int64_t first_key, float *scores) {
    constexpr int32_t NUMBERS[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Places places;
    std::memcpy(&places, NUMBERS, sizeof places);
    const int from = (int)std::max<int64_t>(line.from - first_key, 0);
    const int to = (int)std::min<int64_t>(line.to - first_key, TILE);
    Softmax &part = line.part;
    Chunk s[CHUNKS];
    for (int c = 0; c < CHUNKS; c++) s[c] = chunk_at(scores + c * LENGTH) * p.scale;
    if (p.cap > 0)
        for (int c = 0; c < CHUNKS; c++) s[c] = p.cap * tanh(s[c] / p.cap);
    const int64_t behind = line.to - 1 - first_key;
    if (line.slope != 0) {
        for (int c = 0; c < CHUNKS; c++)
            s[c] = fma(Chunk{} + line.slope,
                       __builtin_convertvector(places + (c * LENGTH - (int)behind), Chunk), s[c]);
    }
    if (p.bias && behind - TILE < p.bias_size) add_bias(p, line, behind, s);
    if (from > 0 || to < TILE)
        for (int c = 0; c < CHUNKS; c++) {
            const Places key = places + c * LENGTH;
            s[c] = (key >= from) & (key < to) ? s[c] : Chunk{} - INFINITY;
        }
    float factor = 1;
    Chunk most = s[0];
    for (int c = 1; c < CHUNKS; c++) most = max(most, s[c]);
    if (const float largest = highest(most); largest > part.largest) {
        factor = exp_nonpositive(Chunk{} + (part.largest - largest))[0];
        part.total = part.total * factor;
        part.largest = largest;
    }
    for (int c = 0; c < CHUNKS; c++) s[c] = exp_nonpositive(s[c] - part.largest);
    Lanes total = as_lanes(part.total);
    if constexpr (Step::PAIRS) {
        for (int n = 0; n < TILE / 32; n++) {
            const Lanes pairs = pairs_of(s, n);
            total = add(add(total, even_elements(pairs)), odd_elements(pairs));
            for (int part = 0; part < Step::PARTS; part++)
                store(scores + part * WEIGHTS<Step> + n * 16, part_of_lanes<Step>(pairs, part));
        }
    } else {
        for (int n = 0; n < TILE / 16; n++) {
            total = add(total, sixteen(s, n));
            store(scores + n * 16, sixteen(s, n));
        }
    }
    part.total = as_vector(total);
    return factor;
}

// Merges the softmax state of later keys, `part`, into `all`; each has `vectors` sums of values.
static inline void merge(Softmax &all, float *all_acc, const Softmax &part, const float *part_acc,
                         int vectors) {
    const float largest = all.largest > part.largest ? all.largest : part.largest;
    const f32x16 before = exp_nonpositive(splat(all.largest - largest));
    const f32x16 now = exp_nonpositive(splat(part.largest - largest));
    all.largest = largest;
    all.total = fma(part.total, now, all.total * before);
    for (int n = 0; n < vectors * 16; n += 16)
        store(all_acc + n, fma(load(part_acc + n), now, load(all_acc + n) * before));
}

// ---- Values ----

// acc = acc * factor + weights @ values over steps [from, to), for L lines and N vectors.
template <class Step, int L, int N>
static INLINE void add_values(const float *weights, const float *values, int stride, int from,
                              int to, float *acc, const float *factors) {
    Lanes sum[L][N];
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N; n++) sum[l][n] = times(lanes_at(acc + l * stride + n * 16), factors[l]);
    for (int s = from; s < to; s++)
        for (int part = 0; part < Step::PARTS; part++) {
            Lanes lanes[N];
            const float *at = values + (s * Step::PARTS + part) * stride;
            for (int n = 0; n < N; n++) lanes[n] = lanes_at(at + n * 16);
            for (int l = 0; l < L; l++) {
                const Lanes x = spread(weights[l * TILE + part * WEIGHTS<Step> + s]);
                for (int n = 0; n < N; n++) sum[l][n] = Step::mac(x, lanes[n], sum[l][n]);
            }
        }
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N; n++) store(acc + l * stride + n * 16, sum[l][n]);
}

// The same for one line and one step. `seen` masks the halves that the line sees: unseen values may be
// anything, and 0 * NaN is NaN.
template <class Step>
static inline void add_step(const float *weights, const float *values, int stride, int vectors,
                            int step, uint32_t seen, float *acc) {
    for (int part = 0; part < Step::PARTS; part++) {
        const Lanes weight = spread(weights[part * WEIGHTS<Step> + step]);
        const uint32_t mask = Step::PARTS == 1 ? seen : seen & (part == 0 ? 0xffff0000u : 0xffffu) ? ~0u : 0;
        for (int n = 0; n < vectors * 16; n += 16) {
            const Lanes lanes = bits_under(mask, lanes_at(values + (step * Step::PARTS + part) * stride + n));
            store(acc + n, Step::mac(weight, lanes, lanes_at(acc + n)));
        }
    }
}

// Both for keys [from, to) of a tile directly from the rows, for L lines that see the same keys and for
// vectors [i, i + N) of the rows.
template <class Rows, class Step, bool WHOLE, int L, int N>
static INLINE void add_rows(const float *weights, const char *const *rows, int width, int i,
                            int from, int to, float *acc, int stride, const float *factors) {
    constexpr int KEYS = Step::PAIRS ? 2 : 1, M = Rows::PAIRED ? 2 : 1;
    Lanes sum[L][N * M];
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N * M; n++)
            sum[l][n] = times(lanes_at(acc + l * stride + (i * M + n) * 16), factors[l]);
    const auto step = [&](int s, uint32_t seen) __attribute__((always_inline)) {
        for (int n = 0; n < N; n++) {
            Lanes out[M];
            for (int k = 0; k < KEYS; k++) fetch<Rows>(rows + s * KEYS + k, width, i + n);
            expand<Rows, Step::PAIRS, WHOLE>(rows + s * KEYS, width, i + n, out);
            for (int m = 0; m < M; m++) {
                const Lanes both = bits_under(seen, out[m]);
                for (int part = 0; part < Step::PARTS; part++) {
                    const Lanes lanes = part_of_lanes<Step>(both, part);
                    for (int l = 0; l < L; l++) {
                        const Lanes weight = spread(weights[l * TILE + part * WEIGHTS<Step> + s]);
                        sum[l][n * M + m] = Step::mac(weight, lanes, sum[l][n * M + m]);
                    }
                }
            }
        }
    };
    int s = from / KEYS;
    if (from % KEYS) step(s++, 0xffff0000u);
    for (; s < to / KEYS; s++) step(s, 0xffffffffu);
    if (to % KEYS && s * KEYS < to) step(s, 0xffffu);
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N * M; n++) store(acc + l * stride + (i * M + n) * 16, sum[l][n]);
}

}  // namespace vb::attention
