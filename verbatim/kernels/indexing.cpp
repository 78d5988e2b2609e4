// Scores of an indexer's keys: dot products, or their weighted sum over the heads.
//
// `verbatim/kv/indexing.py` says the same in torch, bit for bit: every sum adds halves. Sixteen keys are
// scored at a time, a lane each, so that they are added in that order without a shuffle.

#include <cstdint>
#include <vector>

#include "threads.h"

namespace {

constexpr int64_t KEYS = 16;
struct Lanes {
    float of[KEYS];
};

// The sum of `count` numbers of each key, in x[0].
static void add_halves(Lanes *x, int64_t count) {
    while (count > 1) {
        const int64_t half = count / 2;
        for (int64_t i = 0; i < half; i++)
            for (int64_t j = 0; j < KEYS; j++) x[i].of[j] += x[half + i].of[j];
        if (count % 2) x[half] = x[count - 1];
        count = half + count % 2;
    }
}

static void dot(Lanes *__restrict x, const float *__restrict q, const Lanes *__restrict keys,
                int64_t depth) {
    const int64_t half = depth / 2;
    for (int64_t i = 0; i < half; i++) {
        const float low = q[i], high = q[half + i];
        for (int64_t j = 0; j < KEYS; j++)
            x[i].of[j] = low * keys[i].of[j] + high * keys[half + i].of[j];
    }
    if (depth % 2)
        for (int64_t j = 0; j < KEYS; j++) x[half].of[j] = q[depth - 1] * keys[depth - 1].of[j];
    add_halves(x, half + depth % 2);
}

}  // namespace

// out[rows, groups, length] from q[rows, heads, depth] and keys[length, depth]. With weights[rows, heads] there
// is one group, the sum of weight * max(score, 0) over the heads; without (null), each head is one.
extern "C" void vb_index_scores(float *out, const float *q, const float *keys, const float *weights,
                                int64_t rows, int64_t heads, int64_t depth, int64_t length,
                                int threads) {
    using namespace vb;
    const int64_t tiles = (length + KEYS - 1) / KEYS;
    threads = (int)std::min<int64_t>(threads_for(rows * heads * depth * length, 0, threads), tiles);
    parallel(threads, [&](int thread) {
        std::vector<Lanes> turned(depth), x(depth), scores(heads);
        for (int64_t t = tiles * thread / threads; t < tiles * (thread + 1) / threads; t++) {
            const int64_t first = t * KEYS, count = std::min(KEYS, length - first);
            for (int64_t i = 0; i < depth; i++)
                for (int64_t j = 0; j < KEYS; j++)
                    turned[i].of[j] = j < count ? keys[(first + j) * depth + i] : 0.0f;
            for (int64_t r = 0; r < rows; r++) {
                for (int64_t h = 0; h < heads; h++) {
                    dot(x.data(), q + (r * heads + h) * depth, turned.data(), depth);
                    scores[h] = x[0];
                    if (!weights) continue;
                    const float weight = weights[r * heads + h];
                    for (float &score : scores[h].of) score = (score < 0 ? 0.0f : score) * weight;
                }
                if (weights) add_halves(scores.data(), heads);
                const int64_t groups = weights ? 1 : heads;
                for (int64_t g = 0; g < groups; g++)
                    for (int64_t j = 0; j < count; j++)
                        out[(r * groups + g) * length + first + j] = scores[g].of[j];
            }
        }
    });
}
