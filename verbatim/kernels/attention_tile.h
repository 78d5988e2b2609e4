// The arithmetic of one tile of keys: scores, softmax weights, weighted values.
//
// A "line" is one query head of one query row. Nothing here lets one line see another: going
// through a tile together only shares loads. Scores and values are both products of a line with the
// laid out tile (attention_rows.h), each element one chain of `mac` in the order of its steps.
#pragma once

#include "attention_rows.h"

#include <algorithm>
#include <cmath>

namespace vb::attention {

constexpr int SEGMENT = 1024;  // keys of one online softmax; those of a line are merged in order

constexpr int FEW = 8;  // lines for which a tile is not laid out

#if defined(__AVX512F__)
constexpr int LINES = 6, VECTORS = 4;  // that are computed together: what fits into the registers
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

// The dot products of L queries with VECTORS * 16 keys.
template <class Step, int L>
static inline void score_lines(const float *queries, int stride, const float *columns, int steps,
                               float *scores) {
    f32x16 sum[L][VECTORS] = {};
    multiply<Step, L, VECTORS>(queries, stride, columns, TILE, 0, steps, sum);
    for (int l = 0; l < L; l++)
        for (int n = 0; n < VECTORS; n++) store(scores + l * TILE + n * 16, sum[l][n]);
}

// The same for the keys of chunks [from, to) and a few lines straight from the rows: writing a tile
// down would cost more than it saves, for it drives out of the nearest cache what is fetched there.
// Neighbouring pieces of work are chunks, whose sums don't wait for each other.
template <class Rows, class Step>
static inline void score_few(const char *const *rows, int width, int from, int to, int steps,
                             const float *queries, int stride, int lines, float *scores,
                             Ahead &ahead) {
    constexpr int SPLIT = Rows::PAIRED && !Step::PAIRS ? 2 : 1;  // steps to a lane
    const int vectors = (width + (Rows::PAIRED ? 31 : 15)) / (Rows::PAIRED ? 32 : 16);
    const int share = (CHUNK + vectors - 1) / vectors;
    each_vector<Rows>(width, [&](int i, auto whole) {
        const int first = i * 16 * SPLIT, count = whole.value ? 16 * SPLIT : steps - first;
        for (int c = from; c < to; c++) {
            u32x16 v[CHUNK];
            for (int j = 0; j < CHUNK; j++)
                v[j] = Rows::template lanes<whole.value>(rows[c * CHUNK + j], width, i);
            ahead.fetch(share);
            transpose(v);
            for (int l = 0; l < lines; l++) {
                const float *q = queries + l * stride + first;
                float *at = scores + l * TILE + c * CHUNK;
                f32x16 sum = i == 0 ? splat(0.0f) : load(at);
                for (int s = 0; s < count; s++) {
                    u32x16 lanes = v[s / SPLIT];
                    if (SPLIT == 2) lanes = s % 2 ? lanes & 0xffff0000u : lanes << 16;
                    sum = Step::mac(splat(q[s]), (f32x16)lanes, sum);
                }
                store(at, sum);
            }
        }
    });
}

// ---- Softmax ----

// An online softmax over some keys: what was weighed so far, relative to the largest score.
struct Softmax {
    f32x16 total;   // of the weights, by lane
    float largest;  // score
};

struct Line {
    int64_t row;        // of the flat batch
    int head;           // of the query
    int64_t from, to;   // the keys it sees, [from, to)
    float slope;        // ALiBi
    Softmax part, all;  // of the segment at hand, and of those before it
};

// The largest lane, in four steps where `max_lane` takes fifteen.
static INLINE float highest(f32x16 v) {
    v = max(v, LANES(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = max(v, LANES(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = max(v, LANES(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = max(v, LANES(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}

// Turns a tile's dot products into weights and returns the factor for what the segment had before.
// With PAIRS the weights are rounded to bf16, two keys to a lane; their total is that of the
// rounded ones, so that the result is a true mean of the values.
template <class Step>
static INLINE float weigh(Line &line, int64_t first_key, float scale, float cap, float *scores) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int from = (int)std::max<int64_t>(line.from - first_key, 0);
    const int to = (int)std::min<int64_t>(line.to - first_key, TILE);
    Softmax &part = line.part;
    f32x16 s[CHUNKS];
    for (int c = 0; c < CHUNKS; c++) s[c] = load(scores + c * CHUNK) * scale;
    if (cap > 0)
        for (int c = 0; c < CHUNKS; c++) s[c] = cap * tanh(s[c] / cap);
    if (line.slope != 0) {
        const int behind = (int)(line.to - 1 - first_key);
        for (int c = 0; c < CHUNKS; c++)
            s[c] = fma(splat(line.slope),
                       __builtin_convertvector(lanes + (c * CHUNK - behind), f32x16), s[c]);
    }
    if (from > 0 || to < TILE)
        for (int c = 0; c < CHUNKS; c++) {
            const i32x16 key = lanes + c * CHUNK;
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
        store(scores + c * CHUNK, s[c]);
    }
    return factor;
}

// One softmax over the keys of `all`, then those of `part`, with `vectors` sums of values each.
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

// The same for one line and one step, of which `seen` masks the halves that the line sees: what it
// does not see may be anything, and 0 * NaN is NaN.
template <class Step>
static inline void add_step(const float *weights, const float *values, int stride, int vectors,
                            int step, uint32_t seen, float *acc) {
    const f32x16 weight = splat(weights[step]);
    for (int n = 0; n < vectors * 16; n += 16) {
        const f32x16 lanes = (f32x16)((u32x16)load(values + step * stride + n) & seen);
        store(acc + n, Step::mac(weight, lanes, load(acc + n)));
    }
}

// Both for keys [from, to) of a tile straight from the rows, for L lines that see the same ones and
// vectors [i, i + N) of the rows.
template <class Rows, class Step, bool WHOLE, int L, int N>
static INLINE void add_rows(const float *weights, const char *const *rows, int width, int i,
                            int from, int to, float *acc, int stride, const float *factors,
                            Ahead &ahead) {
    constexpr int KEYS = Step::PAIRS ? 2 : 1, M = Rows::PAIRED ? 2 : 1;
    f32x16 sum[L][N * M];
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N * M; n++)
            sum[l][n] = load(acc + l * stride + (i * M + n) * 16) * factors[l];
    const auto step = [&](int s, uint32_t seen) {
        for (int n = 0; n < N; n++) {
            f32x16 out[M];
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
    for (; s < to / KEYS; s++) {
        ahead.fetch(KEYS);
        step(s, 0xffffffffu);
    }
    if (to % KEYS && s * KEYS < to) step(s, 0xffffu);
    for (int l = 0; l < L; l++)
        for (int n = 0; n < N * M; n++) store(acc + l * stride + (i * M + n) * 16, sum[l][n]);
}

}  // namespace vb::attention
