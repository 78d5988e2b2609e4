// Attention over KV blocks.
//
// Invariant: a row's bits depend on its query, on the keys and values it sees and on the options, never on
// the rows beside it. So every row goes through the same arithmetic (attention_tile.h): keys in tiles at
// absolute positions, one online softmax per segment, values added in position order, and segments merged in
// order. Only the division of the work varies: the query heads of one KV head, and neighbouring rows of a
// prompt, share a tile, which is laid out once for all of them; and threads share the segments of a row.
#include "attention.h"
#include "attention_worker.h"
#include "threads.h"

#include <algorithm>
#include <vector>

#include <omp.h>

namespace {

using namespace vb;
using namespace vb::attention;

// Merges the segments of each line, after several threads have computed them.
void merge_parts(const Problem &p, Parts &parts, bool pairs, int threads) {
    const int vectors = sums_of(p, pairs);
    const int64_t first = p.query_starts[0], rows = p.query_starts[p.sequences] - first;
    std::vector<int64_t> sequence_of(rows);
    for (int64_t s = 0; s < p.sequences; s++)
        for (int64_t row = p.query_starts[s]; row < p.query_starts[s + 1]; row++)
            sequence_of[row - first] = s;
    parallel_for(rows * p.heads, threads, [&](int64_t i) {
        Line line;
        begin(line, p, sequence_of[i / p.heads], first + i / p.heads, i % p.heads);
        std::vector<float> acc(vectors * 16, 0.0f);
        for (int64_t s = 0; s < parts.segments; s++) {
            if (!sees(line, s)) continue;
            const int64_t at = parts.at(p, line, s);
            merge(line.all, acc.data(), parts.softmax[at], &parts.acc[at * parts.stride], vectors);
        }
        finish(line, acc.data(), p, pairs);
    });
}

template <class Rows, class Step> void attend(const Problem &p, int threads) {
    const std::vector<Work> work = divide(p, SEGMENT, threads);
    int64_t lines = 1;
    for (const Work &w : work) lines = std::max(lines, w.rows * w.heads);
    const bool shared = !work.empty() && work[0].segment >= 0;
    Parts parts;
    if (shared) {
        parts.segments = (longest(p) + SEGMENT - 1) / SEGMENT;
        parts.stride = sums_of(p, Step::PAIRS) * 16;
        const int64_t all = (p.query_starts[p.sequences] - p.query_starts[0]) * p.heads;
        parts.softmax.resize(all * parts.segments);
        parts.acc.resize(all * parts.segments * parts.stride);
    }
    // Ranges with about equal numbers of keys: the last segment of a sequence may have few.
    std::vector<int64_t> keys = {0};
    for (const Work &w : work) {
        const Span span(p, w);
        keys.push_back(keys.back() + std::max<int64_t>(span.to - span.from, 1) * w.rows);
    }
    const auto edge = [&](int64_t t, int threads) {
        const int64_t wanted = keys.back() * t / threads;
        return std::lower_bound(keys.begin(), keys.end(), wanted) - keys.begin();
    };
    share_out((int64_t)work.size(), threads, edge, [&](int) {
        return [&, worker = Attention<Rows, Step>(p, (int)lines, &parts),
                last = (int64_t)-2](int64_t n, int64_t range_end) mutable {
            worker.run(work[n], n + 1 < range_end ? &work[n + 1] : nullptr, n == last + 1);
            last = n;
        };
    });
    if (shared) merge_parts(p, parts, Step::PAIRS, threads);
}

// Quantizes the rows k and v and writes them to their slots.
template <int BITS, class T>
void pack_kv(const T *k, const T *v, uint8_t *k_store, uint8_t *v_store, const int64_t *slots,
             int64_t tokens, int64_t kv_heads, int64_t block_size, int64_t key_size,
             int64_t value_size, const int64_t *strides, int threads) {
    const int64_t k_bytes = row_bytes<BITS>((int)key_size), v_bytes = row_bytes<BITS>((int)value_size);
    if (tokens * kv_heads * (key_size + value_size) < 1 << 16) threads = 1;
#pragma omp parallel for num_threads(threads_at_once(threads)) schedule(static)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < kv_heads; h++) {
            const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
            const int64_t at = (block * kv_heads + h) * block_size + offset;
            pack_row<BITS>(k + t * strides[0] + h * strides[1], (int)key_size,
                           k_store + at * k_bytes);
            pack_row<BITS>(v + t * strides[2] + h * strides[3], (int)value_size,
                           v_store + at * v_bytes);
        }
}

}  // namespace

extern "C" {

// q and out have one dtype; the stores may have another. Strides count elements. kv_format: 0 for float32, 1
// for bf16, 8 or 4 for quantized rows of so many bits (attention_groups.h).
void vb_attention(const void *q, void *out, const void *k_store, const void *v_store,
                  const int32_t *query_starts, const int32_t *context_lens,
                  const int32_t *block_tables, int64_t sequences, int64_t max_blocks,
                  int64_t q_token_stride, int64_t q_head_stride, int64_t heads, int64_t kv_heads,
                  int64_t key_size, int64_t value_size, int64_t block_size, int64_t window,
                  int64_t chunk, int q_is_bf16, int kv_format, float scale, float cap,
                  const float *sinks, int64_t sink_stride, const float *slopes, const void *bias,
                  int64_t bias_size, int threads) {
    const Problem p = {q, out, k_store, v_store, query_starts, context_lens, block_tables,
                       sequences, max_blocks, q_token_stride, q_head_stride, heads, kv_heads,
                       key_size, value_size, block_size, window, chunk, q_is_bf16, scale, cap,
                       sinks, sink_stride, slopes, bias, bias_size};
    if (threads <= 0) threads = omp_get_max_threads();
    if (effort(p) < (1 << 19)) threads = 1;  // not worth waking the others
    // Quantized rows are dequantized to the queries' dtype.
    if (kv_format == 0) return attend<FloatRows, Singles>(p, threads);
    if (!q_is_bf16) {
        if (kv_format == 8) return attend<PackedRows<8, false>, Singles>(p, threads);
        if (kv_format == 4) return attend<PackedRows<4, false>, Singles>(p, threads);
        return attend<HalfRows, Singles>(p, threads);
    }
    if (kv_format == 8) return attend<PackedRows<8, true>, Pairs>(p, threads);
    if (kv_format == 4) return attend<PackedRows<4, true>, Pairs>(p, threads);
    attend<HalfRows, Pairs>(p, threads);
}

// Copies the rows k [T, Hkv, Dk] and v [T, Hkv, Dv] to their slots in the stores, byte for byte. Sizes and
// strides count bytes; a slot is block * block_size + offset.
void vb_write_kv(const char *k, const char *v, char *k_store, char *v_store, const int64_t *slots,
                 int64_t tokens, int64_t kv_heads, int64_t block_size, int64_t k_bytes,
                 int64_t v_bytes, int64_t k_token_stride, int64_t k_head_stride,
                 int64_t v_token_stride, int64_t v_head_stride, int threads) {
    if (threads <= 0) threads = omp_get_max_threads();
    if (tokens * kv_heads * (k_bytes + v_bytes) < (Team::mine ? 1 << 14 : 1 << 20)) threads = 1;
    parallel_for(tokens, threads, [&](int64_t t) {
        for (int64_t h = 0; h < kv_heads; h++) {
            const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
            const int64_t at = (block * kv_heads + h) * block_size + offset;
            const char *k_row = k + t * k_token_stride + h * k_head_stride;
            const char *v_row = v + t * v_token_stride + h * v_head_stride;
            std::memcpy(k_store + at * k_bytes, k_row, k_bytes);
            std::memcpy(v_store + at * v_bytes, v_row, v_bytes);
        }
    });
}

// Quantizes the rows k [T, Hkv, Dk] and v [T, Hkv, Dv], float32 or bf16, to their slots in stores of 8 or 4
// bits. `strides` are those of k's tokens, k's heads, v's tokens and v's heads, in elements.
void vb_pack_kv(const void *k, const void *v, uint8_t *k_store, uint8_t *v_store,
                const int64_t *slots, int64_t tokens, int64_t kv_heads, int64_t block_size,
                int64_t key_size, int64_t value_size, const int64_t *strides, int is_bf16, int bits,
                int threads) {
    if (threads <= 0) threads = omp_get_max_threads();
#define PACK(BITS, T)                                                                            \
    pack_kv<BITS>((const T *)k, (const T *)v, k_store, v_store, slots, tokens, kv_heads,         \
                  block_size, key_size, value_size, strides, threads)
    if (bits == 8) is_bf16 ? PACK(8, bf16) : PACK(8, float);
    else is_bf16 ? PACK(4, bf16) : PACK(4, float);
#undef PACK
}

}  // extern "C"
