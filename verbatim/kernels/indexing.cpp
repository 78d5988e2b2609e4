// Scores of an indexer's keys: dot products, or their weighted sum over the heads.
//
// `verbatim/kv/indexing.py` has the bit-identical torch version: every sum is a tree that adds halves.
// Sixteen keys are scored at a time, one per lane, so this order needs no shuffles.

#include <cstdint>
#include <vector>

#include "threads.h"
#include "transpose.h"

namespace {

constexpr int64_t KEYS = 16;

// Replaces x[0] by the tree sum of x[count]; each lane is a key.
static void add_halves(f32x16 *x, int64_t count) {
    while (count > 1) {
        const int64_t half = count / 2;
        for (int64_t i = 0; i < half; i++) x[i] += x[half + i];
        if (count % 2) x[half] = x[count - 1];
        count = half + count % 2;
    }
}

// The same tree sum, of every STEP-th product of DEPTH. Each sum is added as soon as its two halves are
// known, so the pending ones fit a few registers.
template <int DEPTH, int STEP>
static INLINE inline f32x16 dot(const float *q, const f32x16 *keys) {
    if constexpr (STEP == DEPTH) return *q * *keys;
    else return dot<DEPTH, 2 * STEP>(q, keys) + dot<DEPTH, 2 * STEP>(q + STEP, keys + STEP);
}

static f32x16 dot(const float *q, const f32x16 *keys, int64_t depth, f32x16 *x) {
    if (depth == 128) return dot<128, 1>(q, keys);
    if (depth == 64) return dot<64, 1>(q, keys);
    for (int64_t i = 0; i < depth; i++) x[i] = q[i] * keys[i];
    add_halves(x, depth);
    return x[0];
}

// Keys [depth] of one sequence: key i is row i, or with a table of blocks the row that it names.
template <typename T> struct Keys {
    const T *rows;
    const int32_t *table;
    int64_t block_size;

    const T *at(int64_t i, int64_t depth) const {
        if (table) i = table[i / block_size] * block_size + i % block_size;
        return rows + i * depth;
    }
};

// Transposes `count` keys from the first, so that each key is a lane.
template <typename T>
static void turn(f32x16 *turned, const Keys<T> &keys, int64_t first, int64_t count, int64_t depth,
                 float *room) {
    for (int64_t i = 0; i < count; i++) {
        const T *key = keys.at(first + i, depth);
        for (int64_t d = 0; d < depth; d++) room[i * depth + d] = to_float(key[d]);
    }
    std::fill(room + count * depth, room + KEYS * depth, 0.0f);
    transpose((float *)turned, KEYS, room, depth, KEYS, depth, nullptr);
}

template <typename T>
static void score(float *out, const float *q, const Keys<T> &keys, const float *weights, int64_t rows,
                  int64_t heads, int64_t depth, int64_t length, int threads) {
    using namespace vb;
    const int64_t tiles = (length + KEYS - 1) / KEYS, groups = weights ? 1 : heads;
    threads = (int)std::min<int64_t>(threads_for(rows * heads * depth * length, 0, threads), tiles);
    parallel(threads, [&](int thread) {
        std::vector<f32x16> turned(depth), x(depth), scores(heads);
        std::vector<float> room(KEYS * depth);
        for (int64_t t = tiles * thread / threads; t < tiles * (thread + 1) / threads; t++) {
            const int64_t first = t * KEYS, count = std::min(KEYS, length - first);
            turn(turned.data(), keys, first, count, depth, room.data());
            for (int64_t r = 0; r < rows; r++) {
                for (int64_t h = 0; h < heads; h++) {
                    f32x16 found = dot(q + (r * heads + h) * depth, turned.data(), depth, x.data());
                    if (weights) found = select(found < 0.0f, splat(0.0f), found) * weights[r * heads + h];
                    scores[h] = found;
                }
                if (weights) add_halves(scores.data(), heads);
                for (int64_t g = 0; g < groups; g++)
                    std::memcpy(out + (r * groups + g) * length + first, &scores[g], 4 * count);
            }
        }
    });
}

}  // namespace

// Computes out[rows, groups, length] from q[rows, heads, depth] and `length` keys. With weights[rows, heads]
// there is one group, the sum of weight * max(score, 0) over the heads; without (null) each head is one. The
// table of the keys' blocks may be null.
#define INSTANCE(suffix, T)                                                                        \
    extern "C" void vb_index_scores_##suffix(                                                      \
        float *out, const float *q, const T *keys, const float *weights, const int32_t *table,     \
        int64_t block_size, int64_t rows, int64_t heads, int64_t depth, int64_t length,            \
        int threads) {                                                                             \
        const Keys<T> all = {keys, table, block_size};                                             \
        score(out, q, all, weights, rows, heads, depth, length, threads);                          \
    }
INSTANCE(f32, float)
INSTANCE(bf16, bf16)
