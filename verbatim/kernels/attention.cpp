// Attention over KV blocks, one query row at a time.
//
// The promise: a row's bits depend on its query, on the keys and values it sees and on the options,
// never on the rows beside it. So every row goes through the same arithmetic (attention_tile.h):
// keys in tiles at absolute positions, each dot product summed by one fixed tree, one online
// softmax, values added in the order of their positions. What may change freely is how rows share
// the work: the query heads of one KV head, and neighbouring rows of a prompt, go through a tile
// together while it lies in the cache.
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

constexpr int TRANSPOSE_FROM = 20;  // lines that make transposing a tile's keys worth its time

// F is the format of queries and keys, V that of values; UNITS is the width of both where the
// compiler knows it, else 0. BITS above 0: the stores hold rows in so few bits, which are unpacked as
// they are copied.
template <class F, class V, int UNITS, int BITS> class Attention {
    typedef typename F::T T;
    struct Keys {  // where the chunks of one tile lie
        const T *k[CHUNKS] = {}, *v[CHUNKS] = {};
    };

    const Problem &p;
    const int k_units, v_units, q_stride;
    const int k_stride, v_stride;  // of rows in whole units
    const bool staged;             // rows are copied first, those of odd sizes padded with zeros
    Scratch scratch;
    Line *lines;
    float *queries, *scores, *acc, *columns;
    T *k_rows, *v_rows;

  public:
    Attention(const Problem &p, int num_lines)
        : p(p), k_units((p.key_size + UNIT - 1) / UNIT), v_units((p.value_size + UNIT - 1) / UNIT),
          q_stride(k_units * F::PARTS * 16), k_stride(k_units * UNIT), v_stride(v_units * UNIT),
          staged(BITS || p.key_size % UNIT || p.value_size % UNIT || p.block_size % CHUNK),
          scratch(num_lines * (sizeof(Line) + 4 * (q_stride + TILE + v_stride) + 256) + 1024 +
                  (num_lines >= TRANSPOSE_FROM ? 4 * q_stride * TILE : 0) +
                  (staged ? TILE * (k_stride + v_stride) * sizeof(T) : 0)) {
        lines = scratch.take<Line>(num_lines);
        queries = scratch.take<float>(num_lines * q_stride);
        scores = scratch.take<float>(num_lines * TILE);
        acc = scratch.take<float>(num_lines * v_stride);
        columns = num_lines >= TRANSPOSE_FROM ? scratch.take<float>(q_stride * TILE) : nullptr;
        k_rows = staged ? scratch.take<T>(TILE * k_stride) : nullptr;
        v_rows = staged ? scratch.take<T>(TILE * v_stride) : nullptr;
    }

    void run(const Work &work) {
        const int n = (int)(work.rows * work.heads);
        for (int i = 0; i < n; i++) begin(i, work);
        const int64_t last = lines[n - 1].to;
        const int64_t first = lines[0].from / TILE * TILE;
        Keys tile = locate(work, first, lines[0].from, last);
        for (int64_t key = first; key < last; key += TILE) {
            // Both ends of what a line sees grow with its row, so the lines that see this tile
            // stand together.
            int a = 0, b = n;
            while (lines[a].to <= key) a++;
            while (lines[b - 1].from >= key + TILE) b--;
            score(tile, a, b, key);
            for (int i = a; i < b; i++) {
                const float factor = weigh(lines[i], key, p.scale, p.cap, scores + i * TILE);
                if (factor == 1) continue;
                for (int d = 0; d < v_stride; d += 16)
                    store(acc + i * v_stride + d, load(acc + i * v_stride + d) * factor);
            }
            const bool more = key + TILE < last && !staged;
            Keys next;
            if (more) next = locate(work, key + TILE, key + TILE, last);
            add(tile, a, b, key, more ? next.k : nullptr);
            tile = staged && key + TILE < last ? locate(work, key + TILE, key + TILE, last) : next;
        }
        for (int i = 0; i < n; i++) finish(i);
    }

  private:
    void begin(int i, const Work &work) {
        Line &line = lines[i];
        const int64_t s = work.sequence;
        line.row = work.row + i / work.heads;
        line.head = (int)(work.head + i % work.heads);
        line.to = p.context_lens[s] - p.query_starts[s + 1] + line.row + 1;
        line.from = p.window > 0 ? std::max<int64_t>(0, line.to - p.window) : 0;
        line.slope = p.slopes ? p.slopes[line.head] : 0;
        // A sink is a logit that is there before the first key, and has no value.
        line.largest = p.sinks ? p.sinks[line.head] : -INFINITY;
        line.total = splat(0.0f);
        if (line.largest > -INFINITY) line.total[0] = 1;
        std::fill_n(acc + i * v_stride, v_stride, 0.0f);
        const int64_t at = line.row * p.q_token_stride + line.head * p.q_head_stride;
        float *to = queries + i * q_stride;
        if (F::PARTS == 1) {
            std::memcpy(to, (const bf16 *)p.q + at, p.key_size * sizeof(bf16));
        } else {
            for (int e = 0; e < p.key_size; e++)
                to[V::place(e)] = p.q_is_bf16 ? to_float(((const bf16 *)p.q)[at + e])
                                              : ((const float *)p.q)[at + e];
        }
    }

    // The keys and values of a tile in [from, to), unpacked block by block.
    void unpack(const Work &work, int64_t first, int64_t from, int64_t to) {
        const auto row_of = [&](int64_t key) {
            const int64_t block = p.block_tables[work.sequence * p.max_blocks + key / p.block_size];
            return (block * p.kv_heads + work.kv_head) * p.block_size + key % p.block_size;
        };
        const int k_width = UNITS ? UNITS * UNIT : (int)p.key_size;
        const int v_width = UNITS ? UNITS * UNIT : (int)p.value_size;
        const int64_t end = std::min(first + TILE, to);
        for (int64_t key = std::max(first, from), n; key < end; key += n) {
            n = std::min(p.block_size - key % p.block_size, end - key);
            const int64_t at = row_of(key), ahead = key + n < to ? row_of(key + n) : at;
            unpack_rows<BITS>((const uint8_t *)p.k_store, at, ahead, (int)n, k_width,
                              k_rows + (key - first) * k_stride, k_stride);
            unpack_rows<BITS>((const uint8_t *)p.v_store, at, ahead, (int)n, v_width,
                              v_rows + (key - first) * v_stride, v_stride);
        }
    }

    // Where the keys of a tile lie, or a copy of those in [from, to).
    Keys locate(const Work &work, int64_t first, int64_t from, int64_t to) {
        Keys keys;
        if constexpr (BITS > 0) {
            unpack(work, first, from, to);
            for (int c = 0; c < CHUNKS; c++) {
                keys.k[c] = k_rows + c * CHUNK * k_stride;
                keys.v[c] = v_rows + c * CHUNK * v_stride;
            }
            return keys;
        }
        const int32_t *table = p.block_tables + work.sequence * p.max_blocks;
        for (int c = 0; c < CHUNKS; c++) {
            const int64_t begin = std::max(first + c * CHUNK, from / CHUNK * CHUNK);
            const int64_t end = std::min(first + (c + 1) * CHUNK, to);
            if (staged) {
                keys.k[c] = k_rows + c * CHUNK * k_stride;
                keys.v[c] = v_rows + c * CHUNK * v_stride;
            }
            for (int64_t key = staged ? std::max(begin, from) : begin; key < end; key++) {
                const int64_t block = table[key / p.block_size];
                const int64_t at = (block * p.kv_heads + work.kv_head) * p.block_size +
                                   key % p.block_size;
                const T *k = (const T *)p.k_store + at * p.key_size;
                const T *v = (const T *)p.v_store + at * p.value_size;
                if (!staged) {
                    keys.k[c] = k, keys.v[c] = v;
                    break;
                }
                std::memcpy(k_rows + (key - first) * k_stride, k, p.key_size * sizeof(T));
                std::memcpy(v_rows + (key - first) * v_stride, v, p.value_size * sizeof(T));
            }
        }
        return keys;
    }

    // The dot products of lines [a, b) with the tile. Those of keys that a line does not see are
    // left as they come: `weigh` puts them out.
    void score(const Keys &tile, int a, int b, int64_t key) {
        if (b - a < TRANSPOSE_FROM) {
            // The values are needed next. Each line prefetches its share of a chunk of them.
            const int share = CHUNK / (b - a);
            for (int i = a; i < b; i++)
                for (int c = 0; c < CHUNKS; c++) {
                    if (!tile.k[c]) continue;
                    const T *ahead = tile.v[c] + (i - a) * share * v_stride;
                    store(scores + i * TILE + c * CHUNK,
                          scores_as_stored<F, UNITS>(queries + i * q_stride, tile.k[c], k_units,
                                                     (const char *)ahead, staged ? 0 : share));
                }
            return;
        }
        for (int c = 0; c < CHUNKS; c++)
            if (tile.k[c]) columns_of<F>(tile.k[c], k_units, columns + c * CHUNK);
        for (int i = a; i < b;) {
            const float *q = queries + i * q_stride;
            const bool two = b - i >= 2;
            for (int c = 0; c < CHUNKS && key + c * CHUNK < lines[i + two].to; c += 2)
                (two ? scores_transposed<F, UNITS, 2, 2> : scores_transposed<F, UNITS, 1, 2>)(
                    q, columns + c * CHUNK, k_units, scores + i * TILE + c * CHUNK);
            i += 1 + two;
        }
    }

    void add(const Keys &tile, int a, int b, int64_t key, const T *const *ahead) {
        for (int i = a; i < b;) {
            int n;
            if constexpr (ACCUMULATORS >= 24) {
                n = b - i >= 6 ? 6 : b - i >= 4 ? 4 : b - i >= 2 ? 2 : 1;
                if (n == 6) add_lines<6, 2>(tile, i, key, ahead);
                else if (n == 4) add_lines<4, 2>(tile, i, key, ahead);
                else if (n == 2) add_lines<2, 4>(tile, i, key, ahead);
                else add_lines<1, 4>(tile, i, key, ahead);
            } else {
                n = ACCUMULATORS >= 4 && b - i >= 2 ? 2 : 1;
                if (n == 2) add_lines<2, 1>(tile, i, key, ahead);
                else add_lines<1, 1>(tile, i, key, ahead);
            }
            ahead = nullptr;
            i += n;
        }
    }

    // The keys that all L lines see together, and those before and after line by line.
    template <int L, int U>
    void add_lines(const Keys &tile, int i, int64_t key, const T *const *ahead) {
        const auto from = [&](int j) { return (int)std::max<int64_t>(lines[j].from - key, 0); };
        const auto to = [&](int j) { return (int)std::min<int64_t>(lines[j].to - key, TILE); };
        const int begin = from(i + L - 1), end = to(i);
        if (begin >= end) {
            for (int j = i; j < i + L; j++) add_range<1, U>(tile, j, from(j), to(j), nullptr);
            return;
        }
        for (int j = i; j < i + L; j++) add_range<1, U>(tile, j, from(j), begin, nullptr);
        add_range<L, U>(tile, i, begin, end, ahead);
        for (int j = i; j < i + L; j++) add_range<1, U>(tile, j, end, to(j), nullptr);
    }

    template <int L, int U>
    void add_range(const Keys &tile, int i, int from, int to, const T *const *ahead) {
        if (from >= to) return;
        int u = 0;
        for (; u + U <= v_units; u += U, ahead = nullptr)
            add_units<L, U>(tile, i, u, from, to, ahead);
        for (; u < v_units; u++, ahead = nullptr) add_units<L, 1>(tile, i, u, from, to, ahead);
    }

    template <int L, int U>
    void add_units(const Keys &tile, int i, int u, int from, int to, const T *const *ahead) {
        const T *v[CHUNKS];
        for (int c = 0; c < CHUNKS; c++) v[c] = tile.v[c] ? tile.v[c] + u * UNIT : nullptr;
        add_values<V, UNITS, L, U>(scores + i * TILE, v, v_units, from, to,
                                   acc + i * v_stride + u * UNIT, ahead);
    }

    void finish(int i) {
        const float total = sum(lines[i].total);
        const float factor = total == 0 ? 0 : 1 / total;  // 0: a row that sees nothing
        const int64_t at = (lines[i].row * p.heads + lines[i].head) * p.value_size;
        for (int e = 0; e < p.value_size; e++) {
            const float x = acc[i * v_stride + V::place(e)] * factor;
            if (p.q_is_bf16) put((bf16 *)p.out + at + e, x);
            else put((float *)p.out + at + e, x);
        }
    }
};

template <class F, class V, int UNITS, int BITS> void attend(const Problem &p, int threads) {
    const std::vector<Work> work = divide(p, threads);
    int64_t lines = 1;
    for (const Work &w : work) lines = std::max(lines, w.rows * w.heads);
#pragma omp parallel num_threads(threads)
    {
        Attention<F, V, UNITS, BITS> worker(p, (int)lines);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < work.size(); i++) worker.run(work[i]);
    }
}

template <class F, class V, int BITS = 0> void attend_width(const Problem &p, int threads) {
    const int64_t width = p.key_size == p.value_size ? p.key_size : 0;
    if (width == 64) attend<F, V, 2, BITS>(p, threads);
    else if (width == 128) attend<F, V, 4, BITS>(p, threads);
    else attend<F, V, 0, BITS>(p, threads);
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
    if (kv_format == 8) return attend_width<Floats, Floats, 8>(p, threads);
    if (kv_format == 4) return attend_width<Floats, Floats, 4>(p, threads);
    if (kv_format == 0) return attend_width<Floats, Floats>(p, threads);
#if defined(__AVX512BF16__)
    if (q_is_bf16) return attend_width<Pairs, Halves>(p, threads);
#endif
    attend_width<Halves, Halves>(p, threads);
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
