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
    static INLINE inline f32x16 mac(f32x16 a, f32x16 b, f32x16 sum) { return fma(a, b, sum); }
};

struct Wide : Singles {  // two multiplications in float32
    static constexpr bool PAIRS = true;
    static constexpr int PARTS = 2;
};

#if defined(__AVX512BF16__)
struct Pairs {  // both are multiplied and added in one instruction
    static constexpr bool PAIRS = true;
    static constexpr int PARTS = 1;
    static INLINE inline f32x16 mac(f32x16 a, f32x16 b, f32x16 sum) {
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
};
#else
typedef Wide Pairs;
#endif

template <class Step> using Flush = FlushSubnormals<Step::PARTS == 2>;

// Part `part` of lanes that hold pairs, or the lanes.
template <class Step> static INLINE inline f32x16 part_of_lanes(f32x16 lanes, int part) {
    if (Step::PARTS == 1) return lanes;
    return part == 0 ? odd_elements((u32x16)lanes) : even_elements((u32x16)lanes);
}

// The weights of a tile are stored by parts, each with as many weights as there are steps.
template <class Step> constexpr int WEIGHTS = Step::PARTS == 2 ? TILE / 2 : TILE;

// ---- Scores ----

// A dot product is eight chains: for each quarter of a vector, one of the even lanes and one of the odd
// lanes. A tree adds them: even and odd, then neighbouring quarters, then halves. Two keys share a vector
// (`join`), and several sums are added together, so that lanes freed by one sum hold those of another.
#if defined(__AVX512F__)
constexpr int SUMS = 16, MOST_QUERIES = 4;

#define EVEN4(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD4(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)

template <int N> static INLINE inline void add_quarters(const f32x16 *from, f32x16 *to) {
    for (int i = 0; i < N; i++)
        to[i] = EVEN4(from[2 * i], from[2 * i + 1]) + ODD4(from[2 * i], from[2 * i + 1]);
}

// Writes the two dot products of each sum, in order.
static INLINE inline void add_chains(const f32x16 *sum, float *dots) {
    f32x16 quarters[8], halves[4], all[2];
    for (int i = 0; i < 8; i++)
        quarters[i] = add_pairs(sum[2 * i], sum[2 * i + 1]);
    add_quarters<4>(quarters, halves), add_quarters<2>(halves, all);
    store(dots, all[0]), store(dots + 16, all[1]);
}
#else
constexpr int SUMS = 4, MOST_QUERIES = 2;

// The sum of the quarters of a vector.
template <class V> static INLINE inline f32x4 sum_of_quarters(V v) {
    if constexpr (sizeof(V) == sizeof(f32x4)) return v;
    else return sum_of_quarters(low_half(v)) + sum_of_quarters(high_half(v));
}

static INLINE inline void add_chains(const f32x16 *sum, float *dots) {
    for (int i = 0; i < SUMS; i += 2)
        store_bits(dots + 2 * i, sum_of_quarters(add_pairs(sum[i], sum[i + 1])));
}
#endif

template <int L> constexpr int PAIRS_OF_KEYS = SUMS / L;  // multiplied with L queries at once

template <int L> static INLINE inline void put_dots(const f32x16 *sum, float *scores) {
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
        f32x16 sum[SUMS];
        for (int n = 0; n < SUMS; n++) sum[n] = splat(0.0f);
        for (int e = 0; e < stride; e += 16) {
            f32x16 x[L];
            for (int l = 0; l < L; l++) x[l] = load(queries + l * stride + e);
            for (int p = 0; p < P; p++) {
                const f32x16 y = load(pairs + p * stride + e);
                for (int l = 0; l < L; l++) sum[l * P + p] = Step::mac(x[l], y, sum[l * P + p]);
            }
        }
        put_dots<L>(sum, scores + k);
    }
}

// The same for a few lines, directly from the rows: laying out a tile would cost more than it saves, as it
// evicts prefetched data from the L1 cache.
template <class Rows, class Step, int L, bool EXACT>
static INLINE inline void score_rows(const char *const *rows, int width, int from, int to,
                                     const float *queries, int stride, float *scores) {
    constexpr int P = PAIRS_OF_KEYS<L>, VECTORS = Rows::PAIRED && !Step::PAIRS ? 4 : 2;
    for (int k = from; k < to; k += 2 * P) {
        f32x16 sum[SUMS];
        for (int n = 0; n < SUMS; n++) sum[n] = splat(0.0f);
        const auto add = [&](int i, auto whole) INLINE {
            for (int p = 0; p < P; p++) {
                const char *const *pair = rows + k + 2 * p;
                f32x16 y[VECTORS];
                fetch<Rows>(pair, width, i), fetch<Rows>(pair + 1, width, i);
                join<Rows, Step::PAIRS, whole.value>(pair, width, i, y);
                for (int n = 0; n < VECTORS * Step::PARTS; n++) {
                    const f32x16 keys = part_of_lanes<Step>(y[n / Step::PARTS], n % Step::PARTS);
                    for (int l = 0; l < L; l++) {
                        const f32x16 x = load(queries + l * stride + (i * VECTORS * Step::PARTS + n) * 16);
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

constexpr int CHUNKS = TILE / 16;  // vectors of the scores of a tile

// Adds a line's biases to the scores of a tile; its first key is `behind` positions before the line's own.
static inline void add_bias(const Problem &p, const Line &line, int64_t behind, f32x16 *scores) {
    const int64_t at = (line.row * p.heads + line.head) * p.bias_size;
    float bias[TILE] = {};
    for (int64_t k = std::max<int64_t>(0, behind - p.bias_size + 1); k < TILE && k <= behind; k++)
        bias[k] = value_at<bf16>(p.bias, !p.q_is_bf16, at + behind - k);
    for (int c = 0; c < CHUNKS; c++) scores[c] += load(bias + 16 * c);
}

// Turns a tile's dot products into weights, and returns the factor for the segment's earlier sums. With PAIRS
// the weights are rounded to bf16, two keys to a lane or in two parts; their total is that of the rounded
// weights, so that the result is a true mean of the values.
template <class Step>
static INLINE inline float weigh(const Problem &p, Line &line, int64_t first_key, float *scores) {
    const auto places = lane_numbers<i32x16>();
    const int from = (int)std::max<int64_t>(line.from - first_key, 0);
    const int to = (int)std::min<int64_t>(line.to - first_key, TILE);
    Softmax &part = line.part;
    f32x16 s[CHUNKS];
    for (int c = 0; c < CHUNKS; c++) s[c] = load(scores + 16 * c) * p.scale;
    if (p.cap > 0)
        for (int c = 0; c < CHUNKS; c++) s[c] = p.cap * tanh(s[c] / p.cap);
    const int64_t behind = line.to - 1 - first_key;
    if (line.slope != 0) {
        for (int c = 0; c < CHUNKS; c++)
            s[c] = fma(splat(line.slope), convert<f32x16>(places + (16 * c - (int)behind)), s[c]);
    }
    if (p.bias && behind - TILE < p.bias_size) add_bias(p, line, behind, s);
    if (from > 0 || to < TILE)
        for (int c = 0; c < CHUNKS; c++) {
            const i32x16 key = places + 16 * c;
            s[c] = select((key >= from) & (key < to), s[c], splat(-INFINITY));
        }
    float factor = 1;
    f32x16 most = s[0];
    for (int c = 1; c < CHUNKS; c++) most = max(most, s[c]);
    if (const float largest = max_lane(most); largest > part.largest) {
        factor = exp_nonpositive(splat(part.largest - largest))[0];
        part.total = part.total * factor;
        part.largest = largest;
    }
    for (int c = 0; c < CHUNKS; c++) s[c] = exp_nonpositive(s[c] - part.largest);
    f32x16 total = part.total;
    if constexpr (Step::PAIRS) {
        for (int n = 0; n < TILE / 32; n++) {
            const u32x16 pairs = narrow_pairs(s[2 * n], s[2 * n + 1]);
            total = total + even_elements(pairs) + odd_elements(pairs);
            for (int part = 0; part < Step::PARTS; part++)
                store(scores + part * WEIGHTS<Step> + n * 16, part_of_lanes<Step>((f32x16)pairs, part));
        }
    } else {
        for (int n = 0; n < TILE / 16; n++) {
            total += s[n];
            store(scores + n * 16, s[n]);
        }
    }
    part.total = total;
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
static INLINE inline void add_values(const float *weights, const float *values, int stride, int from,
                                     int to, float *acc, const float *factors) {
    f32x16 sum[L][N];
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N; n++) sum[l][n] = load(acc + l * stride + n * 16) * factors[l];
    for (int s = from; s < to; s++)
        for (int part = 0; part < Step::PARTS; part++) {
            f32x16 lanes[N];
            const float *at = values + (s * Step::PARTS + part) * stride;
            for (int n = 0; n < N; n++) lanes[n] = load(at + n * 16);
            for (int l = 0; l < L; l++) {
                const f32x16 x = splat(weights[l * TILE + part * WEIGHTS<Step> + s]);
                for (int n = 0; n < N; n++) sum[l][n] = Step::mac(x, lanes[n], sum[l][n]);
            }
        }
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N; n++) store(acc + l * stride + n * 16, sum[l][n]);
}

// The bits of the lanes under a mask.
static INLINE inline f32x16 under(uint32_t mask, f32x16 lanes) { return (f32x16)((u32x16)lanes & mask); }

// The same for one line and one step. `seen` masks the halves that the line sees: unseen values may be
// anything, and 0 * NaN is NaN.
template <class Step>
static inline void add_step(const float *weights, const float *values, int stride, int vectors,
                            int step, uint32_t seen, float *acc) {
    for (int part = 0; part < Step::PARTS; part++) {
        const f32x16 weight = splat(weights[part * WEIGHTS<Step> + step]);
        const uint32_t mask = Step::PARTS == 1 ? seen : seen & (part == 0 ? 0xffff0000u : 0xffffu) ? ~0u : 0;
        for (int n = 0; n < vectors * 16; n += 16) {
            const f32x16 lanes = under(mask, load(values + (step * Step::PARTS + part) * stride + n));
            store(acc + n, Step::mac(weight, lanes, load(acc + n)));
        }
    }
}

// Both for keys [from, to) of a tile directly from the rows, for L lines that see the same keys and for
// vectors [i, i + N) of the rows.
template <class Rows, class Step, bool WHOLE, int L, int N>
static INLINE inline void add_rows(const float *weights, const char *const *rows, int width, int i,
                                   int from, int to, float *acc, int stride, const float *factors) {
    constexpr int KEYS = Step::PAIRS ? 2 : 1, M = Rows::PAIRED ? 2 : 1;
    f32x16 sum[L][N * M];
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N * M; n++)
            sum[l][n] = load(acc + l * stride + (i * M + n) * 16) * factors[l];
    const auto step = [&](int s, uint32_t seen) INLINE {
        for (int n = 0; n < N; n++) {
            f32x16 out[M];
            for (int k = 0; k < KEYS; k++) fetch<Rows>(rows + s * KEYS + k, width, i + n);
            expand<Rows, Step::PAIRS, WHOLE>(rows + s * KEYS, width, i + n, out);
            for (int m = 0; m < M; m++) {
                const f32x16 both = under(seen, out[m]);
                for (int part = 0; part < Step::PARTS; part++) {
                    const f32x16 lanes = part_of_lanes<Step>(both, part);
                    for (int l = 0; l < L; l++) {
                        const f32x16 weight = splat(weights[l * TILE + part * WEIGHTS<Step> + s]);
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
