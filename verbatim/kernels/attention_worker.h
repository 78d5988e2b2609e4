// One thread's work on attention: the tiles of a piece, and their prefetching.
#pragma once

#include "attention_groups.h"
#include "attention_tile.h"
#include "attention_work.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace vb::attention {

template <int N> struct Count {
    static constexpr int value = N;
};

// Calls f(first, Count<N>) for runs of at most MOST that make up [from, to).
template <int MOST, class Function>
static INLINE inline void in_pieces(int from, int to, const Function &f) {
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

// The results of segments, for lines shared by several threads: softmax states and sums of values, [lines,
// segments] each.
struct Parts {
    int64_t segments;
    int stride;  // of a line's sums, in floats
    std::vector<Softmax> softmax;
    std::vector<float> acc;

    int64_t at(const Problem &p, const Line &line, int64_t segment) const {
        return ((line.row - p.query_starts[0]) * p.heads + line.head) * segments + segment;
    }
};

// Initializes a line: the keys that it sees, and the state before the first of them.
static inline void begin(Line &line, const Problem &p, int64_t sequence, int64_t row, int64_t head) {
    line.row = row, line.head = (int)head;
    line.to = p.context_lens[sequence] - p.query_starts[sequence + 1] + row + 1;
    line.from = p.window > 0 ? std::max<int64_t>(0, line.to - p.window) : 0;
    if (p.chunk > 0) line.from = std::max(line.from, (line.to - 1) / p.chunk * p.chunk);
    line.slope = p.slopes ? p.slopes[head] : 0;
    // A sink is a logit before the first key, without a value.
    line.all.largest = p.sinks ? p.sinks[row * p.sink_stride + head] : -INFINITY;
    const float weight = line.all.largest > -INFINITY ? 1 : 0;
    line.all.total = load_first(&weight, 1);
}

// The number of vectors of a line's sums of values; even with `pairs`.
static inline int sums_of(const Problem &p, bool pairs) {
    const int vectors = (int)(p.value_size + 15) / 16;
    return pairs ? (vectors + 1) / 2 * 2 : vectors;
}

// The keys [from, to) seen by any line of a piece of work.
struct Span {
    int64_t from, to;

    Span(const Problem &p, const Work &work) {
        Line first, last;
        begin(first, p, work.sequence, work.row, work.head);
        begin(last, p, work.sequence, work.row + work.rows - 1, work.head);
        from = first.from, to = last.to;
        if (work.segment < 0) return;
        from = std::max(from, work.segment * SEGMENT);
        to = std::min(to, (work.segment + 1) * SEGMENT);
    }
};

static inline bool sees(const Line &line, int64_t segment) {
    return line.from < (segment + 1) * SEGMENT && line.to > segment * SEGMENT;
}

// Writes the output of a line. With `pairs`, sums are interleaved by quarters, as by `expand`.
template <typename T>
static inline void write(const Line &line, const float *acc, const Problem &p, bool pairs) {
    const float total = sum(line.all.total);
    const float factor = total == 0 ? 0 : 1 / total;  // 0: the row sees no keys
    const int width = (int)p.value_size;
    T *out = (T *)p.out + (line.row * p.heads + line.head) * width;
    for (int e = 0; e < (pairs ? (width + 31) / 32 * 32 : width); e += 16) {
        const f32x16 x = load(acc + e) * factor;
        T lanes[16];
        store(lanes, x);
        if (!pairs) std::memcpy(out + e, lanes, std::min(16, width - e) * sizeof(T));
        else
            for (int i = 0; i < 4; i++) {
                const int at = e / 32 * 32 + e % 32 / 4 + 8 * i, n = std::min(4, width - at);
                if (n > 0) std::memcpy(out + at, lanes + 4 * i, n * sizeof(T));
            }
    }
}

static inline void finish(const Line &line, const float *acc, const Problem &p, bool pairs) {
    if (p.q_is_bf16) write<bf16>(line, acc, p, pairs);
    else write<float>(line, acc, p, pairs);
}

// Rows: the format of keys and values. Step: their multiplication.
template <class Rows, class Step> class Attention {
    static constexpr bool PAIRS = Step::PAIRS;
    static constexpr int KEYS = PAIRS ? 2 : 1;  // keys in a step of values
    static constexpr int CHUNK = 2 * SUMS;  // keys: a multiple of those multiplied with queries at once

    const Problem &p;
    Parts *parts;
    const int k_bytes, v_bytes;  // of a row
    const int q_stride, vectors, v_stride;
    const int wide_stride;  // of queries and keys as floats; 0: their pairs are multiplied
    Pieces memory;
    Line *lines;
    float *queries, *wide_queries, *scores, *acc, *all_acc, *keys, *values, *factors;
    char *nothing;  // a row of zeros

    // The addresses of a tile's rows in the order of their use: the row to prefetch is AHEAD entries further
    // on. (If a window begins within the tile, the rows before it are not used, and don't prefetch any.)
    struct Tile {
        const char *rows[2 * TILE + AHEAD];  // keys, values, the next tile's first rows
        int first, last;                     // of the keys that exist: [first, last)
        int begin, end;                      // the same in whole chunks

        const char **values() { return rows + end; }
        const char **next() { return values() + (last + 1) / 2 * 2; }
    } tiles[2];

  public:
    Attention(const Problem &p, int num_lines, Parts *parts)
        : p(p), parts(parts), k_bytes(Rows::bytes((int)p.key_size)),
          v_bytes(Rows::bytes((int)p.value_size)),
          q_stride((int)(p.key_size + 31) / 32 * (PAIRS ? 32 : 64)),
          vectors(sums_of(p, PAIRS)), v_stride((vectors + 1) / 2 * 32),
          wide_stride(PAIRS && (!HAS_PAIRS || (num_lines > FEW && uses_floats())) ? 2 * q_stride : 0),
          memory(num_lines * (sizeof(Line) + 4 * (q_stride + wide_stride + TILE + 2 * v_stride + 1)) +
                 1024 + 4 * TILE * (std::max(q_stride, wide_stride) / 2 + v_stride) +
                 std::max(k_bytes, v_bytes)) {
        lines = memory.take<Line>(num_lines);
        queries = memory.take<float>(num_lines * q_stride);
        wide_queries = memory.take<float>(num_lines * wide_stride);
        scores = memory.take<float>(num_lines * TILE);
        acc = memory.take<float>(num_lines * v_stride);
        all_acc = memory.take<float>(num_lines * v_stride);
        keys = memory.take<float>(TILE / 2 * std::max(q_stride, wide_stride));
        values = memory.take<float>(TILE * v_stride);
        factors = memory.take<float>(num_lines);
        nothing = memory.take<char>(std::max(k_bytes, v_bytes));
    }

    // `after`: the next piece of work, or null; its first keys are prefetched during this one. `fetched`:
    // this piece's first keys have been prefetched.
    void run(const Work &work, const Work *after, bool fetched) {
        const int n = (int)(work.rows * work.heads);
        const Span span(p, work);
        for (int i = 0; i < n; i++) {
            begin(lines[i], p, work.sequence, work.row + i / work.heads, work.head + i % work.heads);
            read_query(i);
        }
        if (work.segment >= 0) {
            run_segment(work, n, work.segment, span, after, fetched);
            for (int i = 0; i < n; i++) {
                if (!sees(lines[i], work.segment)) continue;
                const int64_t at = parts->at(p, lines[i], work.segment);
                parts->softmax[at] = lines[i].part;
                std::copy_n(acc + i * v_stride, vectors * 16, &parts->acc[at * parts->stride]);
            }
            return;
        }
        std::fill_n(all_acc, n * v_stride, 0.0f);
        for (int64_t s = span.from / SEGMENT; s * SEGMENT < span.to; s++) {
            run_segment(work, n, s, span, after, fetched);
            fetched = true;
            for (int i = 0; i < n; i++)
                if (sees(lines[i], s))
                    merge(lines[i].all, all_acc + i * v_stride, lines[i].part, acc + i * v_stride,
                          vectors);
        }
        for (int i = 0; i < n; i++) finish(lines[i], all_acc + i * v_stride, p, PAIRS);
    }

  private:
    // Reads a query in the layout of two joined keys, both of them the query.
    void read_query(int i) {
        const int64_t at = lines[i].row * p.q_token_stride + lines[i].head * p.q_head_stride;
        const int width = (int)p.key_size;
        const char *row = (const char *)p.q + at * (p.q_is_bf16 ? 2 : 4);
        const auto read = [&](auto format) {
            typedef decltype(format) Row;
            each_vector<Row>(width, [&](int v, auto whole) {
                constexpr int N = Row::PAIRED && !PAIRS ? 4 : 2;
                const char *both[2] = {row, row};
                f32x16 out[N];
                join<Row, PAIRS, whole.value>(both, width, v, out);
                for (int n = 0; n < N; n++) store(queries + i * q_stride + (v * N + n) * 16, out[n]);
                for (int n = 0; n < N && wide_stride; n++)
                    put<PAIRS>(wide_queries + i * wide_stride, v * N + n, 16, out[n]);
            });
        };
        if constexpr (PAIRS) read(HalfRows());
        else if (p.q_is_bf16) read(HalfRows());
        else read(FloatRows());
    }

    void run_segment(const Work &work, int n, int64_t segment, const Span &span, const Work *after,
                     bool fetched) {
        for (int i = 0; i < n; i++) lines[i].part = {splat(0.0f), -INFINITY};
        std::fill_n(acc, n * v_stride, 0.0f);
        const int64_t from = std::max(span.from, segment * SEGMENT);
        const int64_t to = std::min(span.to, (segment + 1) * SEGMENT);
        if (from >= to) return;
        int64_t key = from / TILE * TILE;
        Tile *now = &tiles[0], *next = &tiles[1];
        locate(work, key, from, to, *now);
        if (!fetched)
            for (int r = 0; r < AHEAD; r++) fetch_row(now->rows[r], k_bytes);
        for (; key < to; key += TILE, std::swap(now, next)) {
            // Both ends of the key range of a line grow with its row, so the lines that see this tile are
            // adjacent.
            int a = 0, b = n;
            while (lines[a].to <= key) a++;
            while (lines[b - 1].from >= key + TILE) b--;
            if (after && key + TILE >= span.to) {
                const Span its(p, *after);
                locate(*after, its.from / TILE * TILE, its.from, its.to, *next);
            } else {
                locate(work, key + TILE, from, span.to, *next);
            }
            std::copy_n(next->rows, AHEAD, now->next());
            if (b - a <= FEW) {
                {
                    [[maybe_unused]] const Flush<Step> flush;
                    in_pieces<MOST_QUERIES>(a, b, [&](int i, auto count) {
                        score_few<Rows, Step, count.value>(now->rows, (int)p.key_size, now->begin, now->end,
                                                           lines_of<Step>(i), line_stride<Step>(),
                                                           scores + i * TILE);
                    });
                }
                weigh_all<Step>(a, b, key);
                for (int i = a; i < b;) {
                    int same = 1;  // lines of one row see the same keys
                    while (i + same < b && lines[i + same].row == lines[i].row) same++;
                    in_pieces<MOST_QUERIES>(i, i + same, [&](int l, auto count) {
                        add_few<count.value>(l, key, now->values());
                    });
                    i += same;
                }
                continue;
            }
            if constexpr (PAIRS && HAS_PAIRS) {
                if (wide_stride) {
                    use_tile<Wide>(a, b, key, *now);
                    continue;
                }
            }
            use_tile<Step>(a, b, key, *now);
        }
    }

    template <class Mac> const float *lines_of(int i) const {
        return Mac::PARTS == 2 ? wide_queries + i * wide_stride : queries + i * q_stride;
    }
    template <class Mac> int line_stride() const { return Mac::PARTS == 2 ? wide_stride : q_stride; }

    template <class Mac> void weigh_all(int a, int b, int64_t key) {
        for (int i = a; i < b; i++) factors[i] = weigh<Mac>(p, lines[i], key, scores + i * TILE);
    }

    // Adds a tile to the lines [a, b), multiplied by `Mac`.
    template <class Mac> void use_tile(int a, int b, int64_t key, Tile &tile) {
        constexpr bool WIDE = Mac::PARTS == 2;
        const int stride = line_stride<Mac>();
        lay_out_keys<Rows, PAIRS, WIDE>(tile.rows, (int)p.key_size, tile.begin, tile.end, keys, stride);
        {  // a score so small that it is flushed has no effect on its weight
            [[maybe_unused]] const Flush<Mac> flush;
            in_pieces<MOST_QUERIES>(a, b, [&](int i, auto count) {
                score_lines<Mac, count.value>(lines_of<Mac>(i), stride, keys, tile.begin, tile.end,
                                              scores + i * TILE);
            });
        }
        weigh_all<Mac>(a, b, key);
        lay_out_values<Rows, PAIRS, WIDE>(tile.values(), (int)p.value_size, tile.first, tile.last, values,
                                          v_stride);
        in_pieces<LINES>(a, b, [&](int i, auto count) { add_lines<Mac, count.value>(i, key); });
    }

    // Adds the values of a tile for L lines that see the same keys.
    template <int L> void add_few(int i, int64_t key, const char *const *rows) {
        if constexpr (Step::PARTS == 2)
            for (int l = i; l < i + L; l++) rescale(l);
        [[maybe_unused]] const Flush<Step> flush;
        const int from = (int)std::max<int64_t>(lines[i].from - key, 0);
        const int to = (int)std::min<int64_t>(lines[i].to - key, TILE);
        const int width = (int)p.value_size, whole = width / (Rows::PAIRED ? 32 : 16);
        const auto add = [&](int u, auto is_whole, auto count) {
            add_rows<Rows, Step, is_whole.value, L, count.value>(
                scores + i * TILE, rows, width, u, from, to, acc + i * v_stride, v_stride, factors + i);
        };
        constexpr int MOST = VECTORS * 2 / std::max(2, L);  // limited by registers
        in_pieces<MOST>(0, whole, [&](int u, auto count) { add(u, Whole(), count); });
        if (width % (Rows::PAIRED ? 32 : 16)) add(whole, Partial(), Count<1>());
    }

    // Finds the rows of the tile from key `start` on; its keys outside of [from, to) are zeros.
    void locate(const Work &work, int64_t start, int64_t from, int64_t to, Tile &tile) {
        const int32_t *table = p.block_tables + work.sequence * p.max_blocks;
        const int64_t first = std::max(start, from), last = std::min(start + TILE, to);
        tile.first = first < last ? (int)(first - start) : 0;
        tile.last = first < last ? (int)(last - start) : 0;
        tile.begin = tile.first / CHUNK * CHUNK, tile.end = (tile.last + CHUNK - 1) / CHUNK * CHUNK;
        const char **keys = tile.rows, **values = tile.values();
        std::fill_n(keys, tile.first, nothing), std::fill_n(values, tile.first, nothing);
        std::fill(keys + tile.last, keys + tile.end, nothing);
        std::fill_n(values + tile.last, AHEAD, nothing);
        for (int64_t key = first; key < last;) {
            const int64_t block = key / p.block_size, offset = key - block * p.block_size;
            const int64_t at = (table[block] * p.kv_heads + work.kv_head) * p.block_size + offset;
            const char *k = (const char *)p.k_store + at * k_bytes;
            const char *v = (const char *)p.v_store + at * v_bytes;
            const int64_t stop = std::min(last, (block + 1) * p.block_size);
            for (; key < stop; key++, k += k_bytes, v += v_bytes)
                keys[key - start] = k, values[key - start] = v;
        }
    }

    // Adds the values of L lines: keys that all of them see together, those before and after line by line.
    template <class Mac, int L> INLINE void add_lines(int i, int64_t key) {
        const auto from = [&](int j) { return (int)std::max<int64_t>(lines[j].from - key, 0); };
        const auto to = [&](int j) { return (int)std::min<int64_t>(lines[j].to - key, TILE); };
        const int begin = (from(i + L - 1) + KEYS - 1) / KEYS, end = to(i) / KEYS;
        if (begin < end) {
            for (int j = i; j < i + L; j++)
                if (from(j) < begin * KEYS) add_steps<Mac>(j, from(j), begin * KEYS);
            for (int j = i; Mac::PARTS == 2 && j < i + L; j++) rescale(j);
            {
                [[maybe_unused]] const Flush<Mac> flush;
                in_pieces<L <= 2 && VECTORS == 4 ? 4 : VECTORS>(0, vectors, [&](int u, auto count) {
                    add_values<Mac, L, count.value>(scores + i * TILE, values + u * 16, v_stride, begin, end,
                                                    acc + i * v_stride + u * 16, factors + i);
                });
            }
            for (int j = i; j < i + L; j++) {
                factors[j] = 1;
                if (to(j) > end * KEYS) add_steps<Mac>(j, end * KEYS, to(j));
            }
        } else {
            for (int j = i; j < i + L; j++) add_steps<Mac>(j, from(j), to(j));
        }
    }

    // Multiplies a line's sums by its factor, which becomes 1.
    void rescale(int i) {
        float *sums = acc + i * v_stride;
        if (factors[i] != 1)
            for (int e = 0; e < vectors * 16; e += 16) store(sums + e, load(sums + e) * factors[i]);
        factors[i] = 1;
    }

    // Adds the values of keys [from, to) of the tile to one line, step by step.
    template <class Mac> void add_steps(int i, int from, int to) {
        rescale(i);
        float *sums = acc + i * v_stride;
        [[maybe_unused]] const Flush<Mac> flush;
        for (int step = from / KEYS; step * KEYS < to; step++) {
            uint32_t seen = 0xffffffffu;
            if (PAIRS && step * KEYS < from) seen &= 0xffff0000u;
            if (PAIRS && step * KEYS + 1 >= to) seen &= 0xffffu;
            add_step<Mac>(scores + i * TILE, values, v_stride, vectors, step, seen, sums);
        }
    }
};

}  // namespace vb::attention
