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

struct Singles {  // one multiplication in float32
    static constexpr bool PAIRS = false;
    static INLINE f32x16 mac(f32x16 a, f32x16 b, f32x16 sum) { return fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
struct Pairs {  // a lane holds two bf16; both are multiplied and added in one instruction
    static constexpr bool PAIRS = true;
    static INLINE f32x16 mac(f32x16 a, f32x16 b, f32x16 sum) {
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
};
#endif

// sum[l] += a[l, from:to] @ b[from:to] for L lines and N vectors of b's width.
template <class Step, int L, int N>
static INLINE void multiply(const float *a, int a_stride, const float *b, int b_stride, int from,
                            int to, f32x16 (*sum)[N]) {
    for (int s = from; s < to; s++) {
        f32x16 lanes[N];
        for (int n = 0; n < N; n++) lanes[n] = load(b + s * b_stride + n * 16);
        for (int l = 0; l < L; l++) {
            const f32x16 x = splat(a[l * a_stride + s]);
            for (int n = 0; n < N; n++) sum[l][n] = Step::mac(x, lanes[n], sum[l][n]);
        }
    }
}

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

static INLINE void add_chains(const f32x16 *sum, float *dots) {
    for (int i = 0; i < SUMS; i += 2) {
        f32x4 a[4], b[4];
        std::memcpy(a, &sum[i], sizeof a), std::memcpy(b, &sum[i + 1], sizeof b);
        for (int q = 0; q < 4; q++)
            a[q] = LANES(a[q], b[q], 0, 1, 4, 5) + LANES(a[q], b[q], 2, 3, 6, 7);
        const f32x4 all = (a[0] + a[1]) + (a[2] + a[3]);
        std::memcpy(dots + 2 * i, &all, sizeof all);
    }
}
#endif

template <int L> constexpr int PAIRS_OF_KEYS = SUMS / L;  // multiplied with L queries at once

template <int L> static INLINE void put_dots(const f32x16 *sum, float *scores) {
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
static INLINE void score_rows(const char *const *rows, int width, int from, int to,
                              const float *queries, int stride, float *scores) {
    constexpr int P = PAIRS_OF_KEYS<L>, VECTORS = Rows::PAIRED && !Step::PAIRS ? 4 : 2;
    for (int k = from; k < to; k += 2 * P) {
        f32x16 sum[SUMS];
        for (int n = 0; n < SUMS; n++) sum[n] = splat(0.0f);
        const auto add = [&](int i, auto whole) __attribute__((always_inline)) {
            for (int p = 0; p < P; p++) {
                const char *const *pair = rows + k + 2 * p;
                f32x16 y[VECTORS];
                fetch<Rows>(pair, width, i), fetch<Rows>(pair + 1, width, i);
                join<Rows, Step::PAIRS, whole.value>(pair, width, i, y);
                for (int n = 0; n < VECTORS; n++)
                    for (int l = 0; l < L; l++) {
                        const f32x16 x = load(queries + l * stride + (i * VECTORS + n) * 16);
                        sum[l * P + p] = Step::mac(x, y[n], sum[l * P + p]);
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

// The largest lane, in four steps where `max_lane` takes fifteen.
static INLINE float highest(f32x16 v) {
    v = max(v, LANES(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = max(v, LANES(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = max(v, LANES(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = max(v, LANES(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}

// Adds a line's biases to the scores of a tile; its first key is `behind` positions before the line's own.
static inline void add_bias(const Problem &p, const Line &line, int64_t behind, f32x16 *scores) {
    const int64_t at = (line.row * p.heads + line.head) * p.bias_size;
    float bias[TILE] = {};
    for (int64_t k = std::max<int64_t>(0, behind - p.bias_size + 1); k < TILE && k <= behind; k++)
        bias[k] = value_at<bf16>(p.bias, !p.q_is_bf16, at + behind - k);
    for (int c = 0; c < CHUNKS; c++) scores[c] += load(bias + c * 16);
}

// Turns a tile's dot products into weights, and returns the factor for the segment's earlier sums. With PAIRS
// the weights are rounded to bf16, two keys to a lane; their total is that of the rounded weights, so that
// the result is a true mean of the values.
template <class Step>
static INLINE float weigh(const Problem &p, Line &line, int64_t first_key, float *scores) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int from = (int)std::max<int64_t>(line.from - first_key, 0);
    const int to = (int)std::min<int64_t>(line.to - first_key, TILE);
    Softmax &part = line.part;
    f32x16 s[CHUNKS];
    for (int c = 0; c < CHUNKS; c++) s[c] = load(scores + c * 16) * p.scale;
    if (p.cap > 0)
        for (int c = 0; c < CHUNKS; c++) s[c] = p.cap * tanh(s[c] / p.cap);
    const int64_t behind = line.to - 1 - first_key;
    if (line.slope != 0) {
        for (int c = 0; c < CHUNKS; c++)
            s[c] = fma(splat(line.slope),
                       __builtin_convertvector(lanes + (c * 16 - (int)behind), f32x16), s[c]);
    }
    if (p.bias && behind - TILE < p.bias_size) add_bias(p, line, behind, s);
    if (from > 0 || to < TILE)
        for (int c = 0; c < CHUNKS; c++) {
            const i32x16 key = lanes + c * 16;
            s[c] = (key >= from) & (key < to) ? s[c] : splat(-INFINITY);
        }
    float factor = 1;
    const float largest = highest(max(max(s[0], s[1]), max(s[2], s[3])));
    if (largest > part.largest) {
        factor = exp_nonpositive(splat(part.largest - largest))[0];
        part.total = part.total * factor;
        part.largest = largest;
    }
    for (int c = 0; c < CHUNKS; c++) s[c] = exp_nonpositive(s[c] - part.largest);
#if defined(__AVX512BF16__)
    if constexpr (Step::PAIRS) {
        for (int c = 0; c < CHUNKS; c += 2) {
            const u32x16 pairs = (u32x16)_mm512_cvtne2ps_pbh((__m512)s[c + 1], (__m512)s[c]);
            part.total += (f32x16)(pairs << 16);
            part.total += (f32x16)(pairs & 0xffff0000u);
            store(scores + c / 2 * 16, (f32x16)pairs);
        }
        return factor;
    }
#endif
    for (int c = 0; c < CHUNKS; c++) {
        part.total += s[c];
        store(scores + c * 16, s[c]);
    }
    return factor;
}

#if defined(__AVX512BF16__)
// Turns the weights of a tile, two keys to a lane, into floats in the order of the products.
static INLINE void widen_weights(float *weights) {
    for (int c = CHUNKS / 2 - 1; c >= 0; c--) {
        const f32x16 odd = odd_elements((u32x16)load(weights + c * 16));
        const f32x16 even = even_elements((u32x16)load(weights + c * 16));
        store(weights + c * 32,
              LANES(odd, even, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
        store(weights + c * 32 + 16,
              LANES(odd, even, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
    }
}
#endif

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
    f32x16 sum[L][N];
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N; n++) sum[l][n] = load(acc + l * stride + n * 16) * factors[l];
    multiply<Step, L, N>(weights, TILE, values, stride, from, to, sum);
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N; n++) store(acc + l * stride + n * 16, sum[l][n]);
}

// The same for one line and one step. `seen` masks the halves that the line sees: unseen values may be
// anything, and 0 * NaN is NaN.
template <class Step>
static inline void add_step(const float *weights, const float *values, int stride, int vectors,
                            int step, uint32_t seen, float *acc) {
    const f32x16 weight = splat(weights[step]);
    for (int n = 0; n < vectors * 16; n += 16) {
        const f32x16 lanes = (f32x16)((u32x16)load(values + step * stride + n) & seen);
        store(acc + n, Step::mac(weight, lanes, load(acc + n)));
    }
}

// Both for keys [from, to) of a tile directly from the rows, for L lines that see the same keys and for
// vectors [i, i + N) of the rows.
template <class Rows, class Step, bool WHOLE, int L, int N>
static INLINE void add_rows(const float *weights, const char *const *rows, int width, int i,
                            int from, int to, float *acc, int stride, const float *factors) {
    constexpr int KEYS = Step::PAIRS ? 2 : 1, M = Rows::PAIRED ? 2 : 1;
    f32x16 sum[L][N * M];
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N * M; n++)
            sum[l][n] = load(acc + l * stride + (i * M + n) * 16) * factors[l];
    const auto step = [&](int s, uint32_t seen) {
        for (int n = 0; n < N; n++) {
            f32x16 out[M];
            for (int k = 0; k < KEYS; k++) fetch<Rows>(rows + s * KEYS + k, width, i + n);
            expand<Rows, Step::PAIRS, WHOLE>(rows + s * KEYS, width, i + n, out);
            for (int m = 0; m < M; m++) {
                const f32x16 lanes = (f32x16)((u32x16)out[m] & seen);
                for (int l = 0; l < L; l++)
                    sum[l][n * M + m] =
                        Step::mac(splat(weights[l * TILE + s]), lanes, sum[l][n * M + m]);
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
