// The arguments of one attention call, and their division among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "scratch.h"

namespace vb::attention {

constexpr int MAX_LINES = 64;       // (row, query head) pairs that share a tile

struct Problem {
    const void *q;                    // [T, H, Dk]
    void *out;                        // [T, H, Dv], contiguous
    const void *k_store, *v_store;    // [blocks, Hkv, block_size, Dk or Dv]
    const int32_t *query_starts;      // [S + 1]
    const int32_t *context_lens;      // [S]
    const int32_t *block_tables;      // [S, max_blocks]
    int64_t sequences, max_blocks, q_token_stride, q_head_stride;
    int64_t heads, kv_heads, key_size, value_size, block_size, window, chunk;
    int q_is_bf16;
    float scale, cap;
    const float *sinks;               // [H], or [T, H] with a `sink_stride` of H; or NULL
    int64_t sink_stride;              // between rows
    const float *slopes;              // [H] or NULL
    const void *bias;                 // [T, H, bias_size] in the dtype of q, or NULL
    int64_t bias_size;
};

// A piece of work: some query heads of one KV head, for adjacent rows of one sequence; all keys that they
// see, or only those of segment `segment` if it is not negative.
struct Work {
    int64_t sequence, row, rows, kv_head, head, heads, segment;
};

// Upper bound of the multiplications of a call, to decide whether waking the other threads pays.
static inline int64_t effort(const Problem &p) {
    int64_t keys = 0;
    for (int64_t s = 0; s < p.sequences; s++)
        keys += (int64_t)(p.query_starts[s + 1] - p.query_starts[s]) * p.context_lens[s];
    return keys * p.heads * (p.key_size + p.value_size);
}

static inline int64_t longest(const Problem &p) {
    return p.sequences ? *std::max_element(p.context_lens, p.context_lens + p.sequences) : 0;
}

// Divides a call into pieces: with few lines each if there is little work, and one per segment of `segment`
// keys if there are few pieces, so that no thread is idle. The division does not affect bits.
static inline std::vector<Work> divide(const Problem &p, int64_t segment, int threads) {
    const int64_t group = p.heads / p.kv_heads;
    const int64_t all_rows = p.query_starts[p.sequences] - p.query_starts[0];
    int64_t lines = MAX_LINES;
    while (lines > 8 && all_rows * p.heads < lines * threads * 4) lines /= 2;
    int64_t heads = std::min<int64_t>(group, MAX_LINES);
    if (longest(p) <= segment)  // pieces can't be cut by segments
        while (heads > 8 && all_rows * p.heads < heads * threads) heads = (heads + 1) / 2;
    const int64_t rows = std::max<int64_t>(1, lines / group);
    std::vector<Work> work;
    for (int64_t s = 0; s < p.sequences; s++) {
        const int64_t start = p.query_starts[s];
        for (int64_t end = p.query_starts[s + 1]; end > start; end -= rows)  // longest first
            for (int64_t kv = 0; kv < p.kv_heads; kv++)
                for (int64_t h = 0; h < group; h += heads) {
                    const int64_t first = std::max(start, end - rows);
                    work.push_back({s, first, end - first, kv, kv * group + h,
                                    std::min(heads, group - h), -1});
                }
    }
    // Pieces per thread. A short last segment is not worth a piece of its own.
    const int64_t enough = 2 * longest(p) <= 3 * segment ? 4 : 8;
    if (threads == 1 || (int64_t)work.size() >= enough * threads || longest(p) <= segment)
        return work;
    std::vector<Work> pieces;
    for (int64_t s = 0; s * segment < longest(p); s++)
        for (Work w : work)
            if (w.segment = s; s * segment < p.context_lens[w.sequence]) pieces.push_back(w);
    return pieces;
}

// A buffer, handed out in zeroed pieces of whole cache lines.
class Pieces {
    vb::Scratch<char> memory;
    char *next = memory.data;

  public:
    explicit Pieces(int64_t bytes) : memory(bytes) {}
    template <typename T> T *take(size_t count) {
        T *piece = (T *)next;
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        std::memset(next, 0, bytes);
        next += bytes;
        return piece;
    }
};

}  // namespace vb::attention
