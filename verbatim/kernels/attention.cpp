// Attention over KV blocks.
//
// The promise: a row's bits depend on its query, on the keys and values it sees and on the options,
// never on the rows beside it. So every row goes through the same arithmetic (attention_tile.h):
// keys in tiles at absolute positions, one online softmax for each segment of them, values added in
// the order of their positions, and segments merged in their order. What may change freely is how
// rows share the work: the query heads of one KV head, and neighbouring rows of a prompt, go through
// a tile together, which is laid out once for all of them; and threads share the segments of a row.
#include "attention.h"
#include "attention_groups.h"
#include "attention_tile.h"
#include "attention_work.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <omp.h>

namespace {

using namespace vb;
using namespace vb::attention;

template <int N> struct Count {
    static constexpr int value = N;
};

// f(first, Count<N>) for pieces of at most MOST that make up [from, to).
template <int MOST, class Function> INLINE void in_pieces(int from, int to, const Function &f) {
    while (from < to) {
        const int n = to - from;
        if constexpr (MOST >= 6) {
            if (n >= 6) {
                f(from, Count<6>()), from += 6;
                continue;
            }
        }
        if constexpr (MOST >= 4) {
            if (n >= 4) {
                f(from, Count<4>()), from += 4;
                continue;
            }
        }
        if constexpr (MOST >= 2) {
            if (n >= 2) {
                f(from, Count<2>()), from += 2;
                continue;
            }
        }
        f(from, Count<1>()), from++;
    }
}

// What a segment came to, for lines that several threads share: [lines, segments] of a softmax and
// its sums of values.
struct Parts {
    int64_t segments;
    int stride;  // of the sums, in floats
    std::vector<Softmax> softmax;
    std::vector<float> acc;

    int64_t at(const Problem &p, const Line &line, int64_t segment) const {
        return ((line.row - p.query_starts[0]) * p.heads + line.head) * segments + segment;
    }
};

// Which keys a line sees, and the state before the first of them.
void begin(Line &line, const Problem &p, int64_t sequence, int64_t row, int64_t head) {
    line.row = row, line.head = (int)head;
    line.to = p.context_lens[sequence] - p.query_starts[sequence + 1] + row + 1;
    line.from = p.window > 0 ? std::max<int64_t>(0, line.to - p.window) : 0;
    line.slope = p.slopes ? p.slopes[head] : 0;
    // A sink is a logit that is there before the first key, and has no value.
    line.all.largest = p.sinks ? p.sinks[head] : -INFINITY;
    line.all.total = splat(0.0f);
    if (line.all.largest > -INFINITY) line.all.total[0] = 1;
}

bool sees(const Line &line, int64_t segment) {
    return line.from < (segment + 1) * SEGMENT && line.to > segment * SEGMENT;
}

void finish(const Line &line, const float *acc, const Problem &p) {
    const float total = sum(line.all.total);
    const float factor = total == 0 ? 0 : 1 / total;  // 0: a row that sees nothing
    const int64_t at = (line.row * p.heads + line.head) * p.value_size;
    for (int e = 0; e < p.value_size; e += 16) {
        const f32x16 x = load(acc + e) * factor;
        const int n = std::min<int>(16, (int)p.value_size - e);
        if (p.q_is_bf16) {
            const u16x16 rounded = narrow(x);
            std::memcpy((bf16 *)p.out + at + e, &rounded, n * sizeof(bf16));
        } else {
            store_first((float *)p.out + at + e, x, n);
        }
    }
}

// Rows: how keys and values are stored. Step: how they are multiplied.
template <class Rows, class Step> class Attention {
    static constexpr bool PAIRS = Step::PAIRS;
    static constexpr int KEYS = PAIRS ? 2 : 1;  // to a step of values

    const Problem &p;
    Parts *parts;
    const int k_bytes, v_bytes, steps;  // of rows; of a dot product
    const int q_stride, vectors, v_stride;
    Scratch scratch;
    Line *lines;
    float *queries, *scores, *acc, *all_acc, *columns, *values, *factors;
    char *nothing;  // a row of zeros
    const char *rows[2][2 * TILE];  // of this tile and the next one: keys, then values

  public:
    Attention(const Problem &p, int num_lines, Parts *parts)
        : p(p), parts(parts), k_bytes(Rows::bytes((int)p.key_size)),
          v_bytes(Rows::bytes((int)p.value_size)),
          steps(PAIRS ? (int)(p.key_size + 1) / 2 : (int)p.key_size), q_stride((steps + 15) / 16 * 16),
          vectors((int)(p.value_size + 15) / 16), v_stride((vectors + 1) / 2 * 32),
          scratch(num_lines * (sizeof(Line) + 4 * (q_stride + TILE + 2 * v_stride + 1)) + 1024 +
                  4 * TILE * ((p.key_size + 31) / 32 * 32 + v_stride) +
                  std::max(k_bytes, v_bytes)) {
        lines = scratch.take<Line>(num_lines);
        queries = scratch.take<float>(num_lines * q_stride);
        scores = scratch.take<float>(num_lines * TILE);
        acc = scratch.take<float>(num_lines * v_stride);
        all_acc = scratch.take<float>(num_lines * v_stride);
        columns = scratch.take<float>((p.key_size + 31) / 32 * 32 * TILE);
        values = scratch.take<float>(TILE * v_stride);
        factors = scratch.take<float>(num_lines);
        nothing = scratch.take<char>(std::max(k_bytes, v_bytes));
    }

    void run(const Work &work) {
        const int n = (int)(work.rows * work.heads);
        for (int i = 0; i < n; i++) {
            begin(lines[i], p, work.sequence, work.row + i / work.heads, work.head + i % work.heads);
            read_query(i);
        }
        if (work.segment >= 0) {
            run_segment(work, n, work.segment);
            for (int i = 0; i < n; i++) {
                if (!sees(lines[i], work.segment)) continue;
                const int64_t at = parts->at(p, lines[i], work.segment);
                parts->softmax[at] = lines[i].part;
                std::copy_n(acc + i * v_stride, vectors * 16, &parts->acc[at * parts->stride]);
            }
            return;
        }
        std::fill_n(all_acc, n * v_stride, 0.0f);
        for (int64_t s = lines[0].from / SEGMENT; s * SEGMENT < lines[n - 1].to; s++) {
            run_segment(work, n, s);
            for (int i = 0; i < n; i++)
                if (sees(lines[i], s))
                    merge(lines[i].all, all_acc + i * v_stride, lines[i].part, acc + i * v_stride,
                          vectors);
        }
        for (int i = 0; i < n; i++) finish(lines[i], all_acc + i * v_stride, p);
    }

  private:
    void read_query(int i) {
        const int64_t at = lines[i].row * p.q_token_stride + lines[i].head * p.q_head_stride;
        float *to = queries + i * q_stride;
        if (PAIRS) std::memcpy(to, (const bf16 *)p.q + at, p.key_size * sizeof(bf16));
        else if (!p.q_is_bf16) std::memcpy(to, (const float *)p.q + at, p.key_size * sizeof(float));
        else
            for (int e = 0; e < p.key_size; e++) to[e] = to_float(((const bf16 *)p.q)[at + e]);
    }

    void run_segment(const Work &work, int n, int64_t segment) {
        for (int i = 0; i < n; i++) lines[i].part = {splat(0.0f), -INFINITY};
        std::fill_n(acc, n * v_stride, 0.0f);
        const int64_t from = std::max(lines[0].from, segment * SEGMENT);
        const int64_t to = std::min(lines[n - 1].to, (segment + 1) * SEGMENT);
        if (from >= to) return;
        int now = 0;
        int64_t key = from / TILE * TILE;
        locate(work, key, from, to, now);
        for (; key < to; key += TILE, now ^= 1) {
            // Both ends of what a line sees grow with its row, so the lines that see this tile
            // stand together.
            int a = 0, b = n;
            while (lines[a].to <= key) a++;
            while (lines[b - 1].from >= key + TILE) b--;
            const int first = (int)std::max<int64_t>(from - key, 0);
            const int last = (int)std::min<int64_t>(to - key, TILE);
            locate(work, key + TILE, from, work.segment < 0 ? lines[n - 1].to : to, now ^ 1);
            Ahead ahead = {rows[now ^ 1], k_bytes, v_bytes, 0};
            const auto weigh_all = [&] {
                for (int i = a; i < b; i++)
                    factors[i] = weigh<Step>(lines[i], key, p.scale, p.cap, scores + i * TILE);
            };
            const int first_chunk = first / CHUNK, last_chunk = (last + CHUNK - 1) / CHUNK;
            if (b - a <= FEW) {
                score_few<Rows, Step>(rows[now], (int)p.key_size, first_chunk, last_chunk, steps,
                                      queries + a * q_stride, q_stride, b - a, scores + a * TILE,
                                      ahead);
                weigh_all();
                for (int i = a; i < b;) {
                    const bool two = b - i >= 2 && LINES >= 4 && lines[i].row == lines[i + 1].row;
                    (two ? add_few<2>(i, key, now, ahead) : add_few<1>(i, key, now, ahead));
                    i += 1 + two;
                }
                continue;
            }
            lay_out_keys<Rows, PAIRS>(rows[now], (int)p.key_size, first_chunk, last_chunk, columns,
                                      ahead);
            in_pieces<LINES>(a, b, [&](int i, auto count) {
                for (int k = 0; k < TILE; k += VECTORS * 16)
                    score_lines<Step, count.value>(queries + i * q_stride, q_stride, columns + k,
                                                   steps, scores + i * TILE + k);
            });
            weigh_all();
            lay_out_values<Rows, PAIRS>(rows[now] + TILE, (int)p.value_size, first, last, values,
                                        v_stride, ahead);
            in_pieces<LINES>(a, b, [&](int i, auto count) { add_lines<count.value>(i, key); });
        }
    }

    // The values of a tile for L lines that see the same keys.
    template <int L> void add_few(int i, int64_t key, int now, Ahead &ahead) {
        const int from = (int)std::max<int64_t>(lines[i].from - key, 0);
        const int to = (int)std::min<int64_t>(lines[i].to - key, TILE);
        const int width = (int)p.value_size, whole = width / (Rows::PAIRED ? 32 : 16);
        const auto add = [&](int u, auto is_whole, auto count) {
            add_rows<Rows, Step, is_whole.value, L, count.value>(
                scores + i * TILE, rows[now] + TILE, width, u, from, to, acc + i * v_stride,
                v_stride, factors + i, ahead);
        };
        in_pieces<VECTORS>(0, whole, [&](int u, auto count) { add(u, Whole(), count); });
        if (width % (Rows::PAIRED ? 32 : 16)) add(whole, Partial(), Count<1>());
    }

    // Where the keys of a tile lie; those outside of [from, to) are zeros.
    void locate(const Work &work, int64_t first, int64_t from, int64_t to, int into) {
        const int32_t *table = p.block_tables + work.sequence * p.max_blocks;
        for (int r = 0; r < 2 * TILE; r++) rows[into][r] = nothing;
        const int64_t end = std::min(first + TILE, to);
        for (int64_t key = std::max(first, from); key < end;) {
            int64_t offset = key % p.block_size;
            int64_t at = (table[key / p.block_size] * p.kv_heads + work.kv_head) * p.block_size + offset;
            for (; offset < p.block_size && key < end; offset++, key++, at++) {
                rows[into][key - first] = (const char *)p.k_store + at * k_bytes;
                rows[into][TILE + key - first] = (const char *)p.v_store + at * v_bytes;
            }
        }
    }

    // The keys that all L lines see together, and those before and after line by line.
    template <int L> INLINE void add_lines(int i, int64_t key) {
        const auto from = [&](int j) { return (int)std::max<int64_t>(lines[j].from - key, 0); };
        const auto to = [&](int j) { return (int)std::min<int64_t>(lines[j].to - key, TILE); };
        const int begin = (from(i + L - 1) + KEYS - 1) / KEYS, end = to(i) / KEYS;
        if (begin < end) {
            for (int j = i; j < i + L; j++)
                if (from(j) < begin * KEYS) add_steps(j, from(j), begin * KEYS);
            in_pieces<L <= 2 && VECTORS == 4 ? 4 : VECTORS>(0, vectors, [&](int u, auto count) {
                add_values<Step, L, count.value>(scores + i * TILE, values + u * 16, v_stride, begin,
                                                 end, acc + i * v_stride + u * 16, factors + i);
            });
            for (int j = i; j < i + L; j++) {
                factors[j] = 1;
                if (to(j) > end * KEYS) add_steps(j, end * KEYS, to(j));
            }
        } else {
            for (int j = i; j < i + L; j++) add_steps(j, from(j), to(j));
        }
    }

    // Keys [from, to) of the tile, step by step.
    void add_steps(int i, int from, int to) {
        float *sums = acc + i * v_stride;
        if (factors[i] != 1)
            for (int e = 0; e < vectors * 16; e += 16) store(sums + e, load(sums + e) * factors[i]);
        factors[i] = 1;
        for (int step = from / KEYS; step * KEYS < to; step++) {
            uint32_t seen = 0xffffffffu;
            if (PAIRS && step * KEYS < from) seen &= 0xffff0000u;
            if (PAIRS && step * KEYS + 1 >= to) seen &= 0xffffu;
            add_step<Step>(scores + i * TILE, values, v_stride, vectors, step, seen, sums);
        }
    }
};

// The lines whose segments were shared out.
void merge_parts(const Problem &p, Parts &parts, int threads) {
    const int vectors = (int)(p.value_size + 15) / 16;
    const int64_t first = p.query_starts[0], rows = p.query_starts[p.sequences] - first;
    std::vector<int64_t> sequence_of(rows);
    for (int64_t s = 0; s < p.sequences; s++)
        for (int64_t row = p.query_starts[s]; row < p.query_starts[s + 1]; row++)
            sequence_of[row - first] = s;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < rows * p.heads; i++) {
        Line line;
        begin(line, p, sequence_of[i / p.heads], first + i / p.heads, i % p.heads);
        std::vector<float> acc(vectors * 16, 0.0f);
        for (int64_t s = 0; s < parts.segments; s++) {
            if (!sees(line, s)) continue;
            const int64_t at = parts.at(p, line, s);
            merge(line.all, acc.data(), parts.softmax[at], &parts.acc[at * parts.stride], vectors);
        }
        finish(line, acc.data(), p);
    }
}

template <class Rows, class Step> void attend(const Problem &p, int threads) {
    const std::vector<Work> work = divide(p, SEGMENT, threads);
    int64_t lines = 1;
    for (const Work &w : work) lines = std::max(lines, w.rows * w.heads);
    const bool shared = !work.empty() && work[0].segment >= 0;
    Parts parts;
    if (shared) {
        parts.segments = (longest(p) + SEGMENT - 1) / SEGMENT;
        parts.stride = (int)(p.value_size + 15) / 16 * 16;
        const int64_t all = (p.query_starts[p.sequences] - p.query_starts[0]) * p.heads;
        parts.softmax.resize(all * parts.segments);
        parts.acc.resize(all * parts.segments * parts.stride);
    }
#pragma omp parallel num_threads(threads)
    {
        Attention<Rows, Step> worker(p, (int)lines, &parts);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < work.size(); i++) worker.run(work[i]);
    }
    if (shared) merge_parts(p, parts, threads);
}

// Rows k and v to their slots in stores that hold them in few bits.
template <int BITS, class T>
void pack_kv(const T *k, const T *v, uint8_t *k_store, uint8_t *v_store, const int64_t *slots,
             int64_t tokens, int64_t kv_heads, int64_t block_size, int64_t key_size,
             int64_t value_size, const int64_t *strides, int threads) {
    const int64_t k_bytes = row_bytes<BITS>((int)key_size), v_bytes = row_bytes<BITS>((int)value_size);
    if (tokens * kv_heads * (key_size + value_size) < 1 << 16) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
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

// q and out have one dtype, the stores another or the same one. Strides count elements. kv_format: 0
// for float32, 1 for bf16, 8 or 4 for rows of so many bits, as attention_groups.h describes them.
void vb_attention(const void *q, void *out, const void *k_store, const void *v_store,
                  const int32_t *query_starts, const int32_t *context_lens,
                  const int32_t *block_tables, int64_t sequences, int64_t max_blocks,
                  int64_t q_token_stride, int64_t q_head_stride, int64_t heads, int64_t kv_heads,
                  int64_t key_size, int64_t value_size, int64_t block_size, int64_t window,
                  int q_is_bf16, int kv_format, float scale, float cap, const float *sinks,
                  const float *slopes, int threads) {
    const Problem p = {q, out, k_store, v_store, query_starts, context_lens, block_tables,
                       sequences, max_blocks, q_token_stride, q_head_stride, heads, kv_heads,
                       key_size, value_size, block_size, window, q_is_bf16, scale, cap, sinks,
                       slopes};
    if (threads <= 0) threads = omp_get_max_threads();
    if (effort(p) < (1 << 19)) threads = 1;  // not worth waking the others
    // Rows of few bits are read back in the queries' dtype.
    if (kv_format == 0) return attend<FloatRows, Singles>(p, threads);
    if (!q_is_bf16) {
        if (kv_format == 8) return attend<PackedRows<8, false>, Singles>(p, threads);
        if (kv_format == 4) return attend<PackedRows<4, false>, Singles>(p, threads);
        return attend<HalfRows, Singles>(p, threads);
    }
#if defined(__AVX512BF16__)
    typedef Pairs Step;
#else
    typedef Singles Step;
#endif
    if (kv_format == 8) return attend<PackedRows<8, true>, Step>(p, threads);
    if (kv_format == 4) return attend<PackedRows<4, true>, Step>(p, threads);
    attend<HalfRows, Step>(p, threads);
}

// Rows k [T, Hkv, Dk] and v [T, Hkv, Dv] to their slots in the stores, byte for byte. Sizes and
// strides count bytes; a slot is block * block_size + offset.
void vb_write_kv(const char *k, const char *v, char *k_store, char *v_store, const int64_t *slots,
                 int64_t tokens, int64_t kv_heads, int64_t block_size, int64_t k_bytes,
                 int64_t v_bytes, int64_t k_token_stride, int64_t k_head_stride,
                 int64_t v_token_stride, int64_t v_head_stride, int threads) {
    if (threads <= 0) threads = omp_get_max_threads();
    if (tokens * kv_heads * (k_bytes + v_bytes) < 1 << 20) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < kv_heads; h++) {
            const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
            const int64_t at = (block * kv_heads + h) * block_size + offset;
            const char *k_row = k + t * k_token_stride + h * k_head_stride;
            const char *v_row = v + t * v_token_stride + h * v_head_stride;
            std::memcpy(k_store + at * k_bytes, k_row, k_bytes);
            std::memcpy(v_store + at * v_bytes, v_row, v_bytes);
        }
}

// Rows k [T, Hkv, Dk] and v [T, Hkv, Dv], float32 or bf16, to their slots in stores of 8 or 4 bits.
// `strides` are of k's tokens, k's heads, v's tokens and v's heads, in elements.
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
