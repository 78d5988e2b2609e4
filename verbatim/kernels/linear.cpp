// Matrix products with bits that don't depend on the schedule.
//
// Every element of the output is computed by one fixed sequence of arithmetic along K. The number of rows,
// the tile of the element and the thread decide only when that sequence runs.
//
// The sequence: sixteen float accumulators along K, summed by vb::sum's tree. It is the same for w [N, K], as
// in nn.Linear, and for w [K, N], as in GPT-2.
//
// Products of bf16 flush subnormals, since AVX-512's dot product does (wide.h).
//
// Plain weights are read in place and never packed. Quantized ones are dequantized to bf16 or float, a strip
// at a time or in registers, and then multiplied in the same way. w[K, N] is read in place for few rows
// (columns.h), and transposed to w[N, K] for more, a strip at a time (transpose.h). The bias is added in
// float and the result rounded once.

#include "columns.h"
#include "integer.h"
#include "matrix.h"
#include "packed_tile.h"
#include "scratch.h"
#include "threads.h"
#include "transpose.h"

#include <vector>

namespace {

// ---- division of the work into strips of columns ----

// The division affects only the time. With few rows, the weights are streamed from memory, in strips of a
// width that gives every thread two of them. With more rows, panels of rows are multiplied with a strip that
// stays in the L2 cache. Deep matrices are cut along K into segments for this, and segments into parts, so
// that a part of a panel stays in the L1 cache for a whole group of columns. Accumulators are kept in
// between.
#if defined(__AVX512F__)
constexpr int64_t PANEL_ROWS = 6;
#elif defined(__AVX2__)
constexpr int64_t PANEL_ROWS = 3;
#else
constexpr int64_t PANEL_ROWS = 1;
#endif
constexpr int64_t BLOCK_ROWS = 264, LEAST_COLS = 32, GROUP_COLS = 64, WIDEST = 128;
constexpr int64_t STRIP_BYTES = 512 << 10, SEGMENT_BYTES = 8192, PART_BYTES = 4096;
constexpr int64_t WIDEST_IN_STREAMS = 256, CHUNK_ROWS = 2 * BLOCK_ROWS;

static bool is_packed(const Matrix &m) {
    return (m.format & 255) == INT8 || (m.format & 255) == INT4;
}

// Few rows: those of one tile.
template <typename T> constexpr int64_t FEW_ROWS = HAS_PAIRS && sizeof(T) == 2 ? 8 : PANEL_ROWS;
// So few that quantized weights are dequantized in registers, to bf16. (More take minutes to compile.)
constexpr int64_t FEW_OF_PACKED = HAS_PAIRS ? 8 : std::min<int64_t>(3, PANEL_ROWS);
constexpr int64_t FEW_OF_COLUMNS = PANEL_ROWS == 6 ? 8 : PANEL_ROWS;  // few rows, for w[K, N]

// Interleaved rows are stored in panels, and a tile reads one: at most FEW_ROWS rows make a single panel.
template <typename T> static bool in_streams(const Matrix &m, int64_t rows, bool interleaved) {
    if (m.transposed) return rows <= (interleaved ? FEW_ROWS<T> : FEW_OF_COLUMNS);
    return rows <= (!is_packed(m) ? FEW_ROWS<T> : IS_BF16<T> ? FEW_OF_PACKED : 0);
}

// Division of rows `begin` to `end` into panels: their number, and the first row of each.
template <typename T> struct Panels {
    int64_t begin, end;
    int64_t count() const {
        const int64_t rows = end - begin;
        return rows <= FEW_ROWS<T> ? 1 : (rows + PANEL_ROWS - 1) / PANEL_ROWS;
    }
    int64_t at(int64_t i) const { return begin + (end - begin) * i / count(); }
};

template <typename T> struct Work {
    const T *x;
    const Input<T> *input;  // rows as tiles read them: x, or a copy of it
    int64_t rows, x_stride;
    bool interleaved;  // panels are stored step by step: the first step of all rows, then the second
    const Matrix *matrices;
    int count;
    Output<T> out;
    int64_t out_stride, share;  // share: half of a thread's columns
    const float *wide;          // the rows as floats (widen_steps), in interleaved panels; or null

    int64_t width(const Matrix &m) const {
        const bool streams = in_streams<T>(m, rows, interleaved);
        const int64_t size = wide ? sizeof(float) : sizeof(T);
        const int64_t bytes = std::clamp<int64_t>(m.depth * size, 1, SEGMENT_BYTES);
        const int64_t most = streams ? WIDEST_IN_STREAMS : std::min(WIDEST, STRIP_BYTES / bytes);
        const int64_t least = m.transposed ? GROUP_COLS : LEAST_COLS;  // whole tiles of columns.h
        return std::max(least, std::min(share, most) / least * least);
    }
    int64_t strips(const Matrix &m) const { return (m.cols + width(m) - 1) / width(m); }
};

// A strip: columns `col` to `col + width` of a matrix.
struct Strip {
    const Matrix *matrix;
    int64_t col, width, out;  // out: the column of the output

    RowLayout layout() const { return {matrix->depth, matrix->format, matrix->group}; }
    template <typename T> int64_t stride_bytes() const {
        return is_packed(*matrix) ? layout().bytes : matrix->stride * (int64_t)sizeof(T);
    }
    template <typename T> const char *begin() const {
        const int64_t apart = matrix->transposed ? sizeof(T) : stride_bytes<T>();
        return (const char *)matrix->data + col * apart;
    }
};

template <typename T> static Strip strip_at(const Work<T> &work, int64_t n) {
    int64_t out = 0;
    for (const Matrix *m = work.matrices;; out += m->cols, m++) {
        const int64_t width = work.width(*m), strips = work.strips(*m);
        if (n < strips)
            return {m, n * width, std::min(width, m->cols - n * width), out + n * width};
        n -= strips;
    }
}

// ---- few rows: one panel, at memory speed ----

// Calls f(R, C) with the rows and columns of a tile, as constants. Up to 24 accumulators fit 32 registers,
// with the weights and a row.
template <typename F> static inline void of_height(int64_t rows, F f) {
    const auto with = [&](auto r, auto c) { f(r, c); };
    switch (rows) {
#define HEIGHT(R, C)                                                                               \
    case R: return with(std::integral_constant<int, R>(), std::integral_constant<int, C>());
        HEIGHT(1, 4)
#if defined(__AVX512F__)
        HEIGHT(2, 4)
        HEIGHT(3, 4)
        HEIGHT(4, 4)
        HEIGHT(5, 4)
        HEIGHT(6, 4)
        HEIGHT(7, 3)
        HEIGHT(8, 3)
#elif defined(__AVX2__)
        HEIGHT(2, 2)
        HEIGHT(3, 2)
#endif
#undef HEIGHT
    }
}

// The panel of `rows` rows from `row` on.
template <typename T>
static Place<T> place(const Work<T> &work, const Strip &strip, int64_t row, int64_t rows) {
    const T *bias = (const T *)strip.matrix->bias;
    return {work.input + row * work.x_stride, work.interleaved ? STEP<T> : work.x_stride,
            work.interleaved ? rows : 1, strip.matrix->depth, bias ? bias + strip.col : nullptr,
            work.out + row * work.out_stride + strip.out, work.out_stride};
}

template <typename T>
static void few_rows(const Work<T> &work, const Strip &strip, const char *after) {
    [[maybe_unused]] const FlushSubnormals<IS_BF16<T>> flush;
    const Place<T> p = place(work, strip, 0, work.rows);
    const T *begin = (const T *)strip.begin<T>();
    const int64_t stride = strip.matrix->stride;
    of_height(work.rows, [&](auto r, auto cols) {
        if (strip.matrix->transposed) column_strip<r.value>(p, begin, stride, strip.width, after);
        else lone_strip<r.value, cols.value>(p, begin, stride, strip.width, after);
    });
}

// ---- more rows: panels times a strip that stays in the L2 cache ----

// Returns the length of pieces that cut `whole` elements of K evenly, in whole steps, at most `most` each.
template <typename T> static int64_t even(int64_t whole, int64_t most) {
    const int64_t pieces = std::max<int64_t>(1, (whole + most - 1) / most);
    return ((whole + pieces - 1) / pieces + STEP<T> - 1) / STEP<T> * STEP<T>;
}

// Columns of weights are `stride` elements apart; `weights(from, to)` is the first one, valid for a segment.
// `at(row, height)` is the place of a panel. The panels share the prefetching of the strip `after`,
// evenly if it takes all of them, so that memory is never idle. Its columns are `after_stride` bytes apart.
template <typename W, typename T, typename At, typename Weights>
static void panels(const Strip &strip, int64_t row, int64_t row_end, int64_t depth,
                   Weights weights, int64_t stride, bool cold, const char *after,
                   int64_t after_stride, At at) {
    [[maybe_unused]] const FlushSubnormals<IS_BF16<T>> flush;
    const Panels<T> cut{row, row_end};
    const int64_t count = cut.count(), size = sizeof(W);
    const int64_t segment = count == 1 ? depth : even<T>(depth, SEGMENT_BYTES / size);
    const int64_t part = count == 1 ? depth : even<T>(segment, PART_BYTES / size);
    const W *first = nullptr;
    const int64_t groups = (strip.width + GROUP_COLS - 1) / GROUP_COLS;
    constexpr int64_t EACH = GROUP_COLS * PANEL_ROWS;
    alignas(64) f32x16 kept_here[EACH];
    const bool deep = segment < depth;
    const Scratch<f32x16> kept_deep(deep ? count * groups * EACH : 0);
    f32x16 *kept = deep ? kept_deep.data : kept_here;
    const int64_t fetching = std::max<int64_t>(1, count - cold), steps = depth / STEP<W> + 1;
    const int64_t advance = std::max<int64_t>(64, 4 * after_stride / (fetching * steps) + 1);
    // Panels that fetch one line a step go through memory in order; others fetch a part of each tile.
    const int64_t cols = advance > 64 ? 4 : strip.width, column = advance > 64 ? after_stride : 16 * steps;
    const auto pass = [&](int64_t i, int64_t from, int64_t to) {
        const int64_t height = cut.at(i + 1) - cut.at(i);
        const auto p = at(cut.at(i), height);
        const bool ahead = cold && i == 0;
        const int64_t fetched = (i - cold) * cols * steps * advance / 4;
        const bool enough = !after || fetched >= cols * after_stride || advance > 256;
        const char *later = after + fetched;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t group = g * GROUP_COLS;
            const int64_t group_end = std::min(group + GROUP_COLS, strip.width);
            f32x16 *sums = kept + (deep ? (i * groups + g) * EACH : 0);
            for (int64_t begin = from, end = -1; end < to; begin = end) {
                end = std::min(begin + part, to);
                of_height(height, [&](auto r, auto columns) {
                    // a panel has no more rows, so taller tiles are not needed
                    constexpr int R = std::min<int>(r.value, PANEL_ROWS), C = places(columns.value);
                    const auto go = [&](auto fetch) {
                        tiles<R, C>(p, first, stride, group, group_end, begin, end, sums, fetch);
                    };
                    if (ahead) go(FromMemory{AHEAD_BYTES});
                    else if (enough) go(FromL2{NEAR_BYTES});
                    else if (advance <= 64) go(Later<1>{later, advance, column});
                    else if (advance <= 128) go(Later<2>{later, advance, column});
                    else go(Later<4>{later, advance, column});
                });
            }
        }
    };
    for (int64_t from = 0, to = -1; to < depth; from = to) {
        to = std::min(from + segment, depth);
        first = weights(from, to);
        for (int64_t i = 0; i < count; i++) pass(i, from, to);
    }
}

// ---- a strip that is quantized or transposed ----

// Distance between the columns of a copied strip, in elements: an odd number of cache lines, so that columns
// don't evict one another from the L1 cache.
template <typename T> static int64_t spaced(int64_t depth) {
    constexpr int64_t LINE = 64 / sizeof(T);
    return ((depth + LINE - 1) / LINE | 1) * LINE;
}

// The strip's weights in T, with columns `spaced` apart. `after`: what the thread reads next, or null.
template <typename T> struct Copied : Scratch<T> {
    Copied(const Strip &strip, const char *after) : Scratch<T>(strip.width * spaced<T>(strip.matrix->depth)) {
        const Matrix &m = *strip.matrix;
        const int64_t apart = spaced<T>(m.depth);
        if (m.transposed) {
            const T *from = (const T *)strip.begin<T>();
            transpose(this->data, apart, from, m.stride, m.depth, strip.width, after);
            return;
        }
        const RowLayout row = strip.layout();
        const auto *at = (const uint8_t *)strip.begin<T>();
        of_kind(m.format, m.group, [&](auto code, auto group) {
            for (int64_t c = 0; c < strip.width; c++)
                unpack_row<code.value, group.value>(this->data + c * apart, at + c * row.bytes, row,
                                                    [](int64_t) {});
        });
    }
};

static void few_rows_packed(const Work<bf16> &work, const Strip &strip, const char *after) {
    const Matrix &m = *strip.matrix;
    const RowLayout row = strip.layout();
    const Place<bf16> p = place(work, strip, 0, work.rows);
    const uint8_t *first = (const uint8_t *)strip.begin<bf16>();
    bool quick = false;
    of_kind(m.format, m.group, [&](auto code, auto group) {
        of_height(work.rows, [&](auto r, auto cols) {
            // In registers, 4-bit codes are always indices of a table, even if it is just 0 to 15. Codes that
            // are converted one by one need more registers.
            constexpr int R = r.value, CODE = bits_of(code) == 4 ? TABLE : code.value;
            constexpr int C = !HAS_PAIRS ? R == 1 ? 2 : 1 : looks_up(CODE) || R <= 6 ? cols.value : 2;
            if constexpr (R <= FEW_OF_PACKED) {
                const FlushSubnormals<true> flush;
                quick = packed_strip<R, C, CODE, group.value>(p, first, row, strip.width, after);
            }
        });
    });
    if (quick) return;
    const Copied<bf16> numbers(strip, nullptr);
    of_height(work.rows, [&](auto r, auto cols) {
        constexpr int R = r.value, C = cols.value;
        const FlushSubnormals<true> flush;
        tiles<R, places(C)>(p, numbers.data, spaced<bf16>(m.depth), 0, strip.width, 0, m.depth, nullptr,
                            FromL2{NEAR_BYTES});
    });
}
static void few_rows_packed(const Work<float> &, const Strip &, const char *) {}

// ---- bf16 as floats ----

static int64_t wide_depth(int64_t depth) { return (depth + 31) / 32 * 32; }

// With fewer rows, converting the weights costs more than it saves.
constexpr int64_t WIDE_ROWS = 24;

// Multiplies rows that are floats with a strip of bf16, which is copied to floats by segments.
template <typename T>
static void wide_panels(const Work<T> &work, const Strip &strip, int64_t row, int64_t row_end,
                        const T *weights, int64_t stride, const char *after, int64_t after_stride) {
    const int64_t depth = strip.matrix->depth, whole = wide_depth(depth);
    const int64_t apart = spaced<float>(even<T>(whole, SEGMENT_BYTES / sizeof(float)));
    const Scratch<float> copy(strip.width * apart);
    const auto widened = [&](int64_t from, int64_t to) {
        for (int64_t c = 0; c < strip.width; c++)
            widen_steps(copy.data + c * apart, STEP<float>, weights + c * stride + from,
                        std::min(to, depth) - from);
        return copy.data - from;
    };
    const T *bias = (const T *)strip.matrix->bias;
    const auto at = [&](int64_t first, int64_t height) {
        return Place<T, float>{work.wide + first * whole, STEP<float>, height, whole,
                               bias ? bias + strip.col : nullptr,
                               work.out + first * work.out_stride + strip.out, work.out_stride};
    };
    panels<float, T>(strip, row, row_end, whole, widened, apart, false, after, after_stride, at);
}

// ---- the whole product ----

// Multiplies one strip with rows `row` to `row_end`. `after` is the thread's next strip, or null. `cold`:
// this strip has not been prefetched.
template <typename T>
static void run(const Work<T> &work, const Strip &strip, const Strip *after, int64_t row,
                int64_t row_end, bool cold) {
    const char *ahead = after ? after->begin<T>() : nullptr;
    if (in_streams<T>(*strip.matrix, work.rows, work.interleaved))
        return is_packed(*strip.matrix) ? few_rows_packed(work, strip, ahead)
                                        : few_rows(work, strip, ahead);
    const Matrix &m = *strip.matrix;
    const int64_t stride = strip.stride_bytes<T>();
    const auto multiply = [&](const T *weights, int64_t apart, bool is_cold, const char *after) {
        if constexpr (IS_BF16<T>)
            if (work.wide)
                return wide_panels(work, strip, row, row_end, weights, apart, after, stride);
        const auto in_place = [=](int64_t, int64_t) { return weights; };
        const auto at = [&](int64_t first, int64_t height) { return place(work, strip, first, height); };
        panels<T, T>(strip, row, row_end, m.depth, in_place, apart, is_cold, after, stride, at);
    };
    if (m.transposed || is_packed(m))
        return multiply(Copied<T>(strip, ahead).data, spaced<T>(m.depth), false,
                        m.transposed ? nullptr : ahead);
    multiply((const T *)strip.begin<T>(), m.stride, cold, ahead);
}

// Whether rows evict one another from the L1 cache, as their distance is a multiple of 4096 bytes.
template <typename T> static bool in_conflict(int64_t stride) {
    return stride * (int64_t)sizeof(T) % 4096 == 0;
}

template <typename T>
static void interleave(Input<T> *out, const T *x, int64_t x_stride, int64_t rows, int64_t depth) {
    constexpr int64_t S = STEP<T>;
    for (int64_t r = 0; r < rows; r++, x += x_stride, out += S) {
        int64_t k = 0;
        for (Input<T> *to = out; k + S <= depth; k += S, to += rows * S) copy_inputs(to, x + k, S);
        copy_inputs(out + k * rows, x + k, depth - k);
    }
}

template <typename T> static bool wants_interleaving(const Work<T> &work) {
    if (work.wide) return false;
    if (!std::is_same_v<Input<T>, T>) return true;
    if (PANEL_ROWS == 1 || work.rows < 2) return false;
    return work.rows <= FEW_ROWS<T> || in_conflict<T>(work.x_stride);
}

// Blocks of rows, in whole panels as far as possible: a panel with fewer rows takes as long.
template <typename T> struct Blocks {
    int64_t rows, count, height;
    explicit Blocks(int64_t rows) : rows(rows), count((rows + BLOCK_ROWS - 1) / BLOCK_ROWS) {
        const int64_t panels = std::max<int64_t>(1, count) * PANEL_ROWS;
        height = (rows + panels - 1) / panels * PANEL_ROWS;
    }
    Panels<T> operator[](int64_t i) const { return {height * i, std::min(height * (i + 1), rows)}; }
};

// Products that run together, in pieces: each block of rows times each strip of columns.
template <typename T> class Pieces {
  public:
    explicit Pieces(const std::vector<Work<T>> &works) : works(works) {
        int64_t end = 0;
        for (const auto &work : works) ends.push_back(end += blocks(work) * strips(work));
    }

    int64_t count() const { return ends.back(); }

    struct Piece {
        const Work<T> *work;
        Panels<T> rows;
        Strip strip;
    };

    Piece operator[](int64_t n) const {
        const size_t i = std::upper_bound(ends.begin(), ends.end(), n) - ends.begin();
        const Work<T> &work = works[i];
        const int64_t local = n - (i ? ends[i - 1] : 0), across = strips(work);
        return {&work, Blocks<T>(work.rows)[local / across], strip_at(work, local % across)};
    }

  private:
    static int64_t blocks(const Work<T> &work) { return Blocks<T>(work.rows).count; }
    static int64_t strips(const Work<T> &work) {
        int64_t count = 0;
        for (int i = 0; i < work.count; i++) count += work.strips(work.matrices[i]);
        return count;
    }

    const std::vector<Work<T>> &works;
    std::vector<int64_t> ends;
};

// Copies panels of rows step by step, where that is faster, to `panels`, which has room for all of them.
template <typename T>
static void interleave_rows(std::vector<Work<T>> &works, Input<T> *panels, int64_t stride,
                            int threads) {
    struct Rows {
        Panels<T> rows;
        Input<T> *to;
        const T *from;
        int64_t from_stride;
    };
    std::vector<Rows> all;
    for (auto &work : works) {
        if (!wants_interleaving(work)) continue;
        const Blocks<T> blocks(work.rows);
        for (int64_t i = 0; i < blocks.count; i++)
            all.push_back({blocks[i], panels, work.x, work.x_stride});
        work.input = panels, work.x_stride = stride, work.interleaved = true;
        panels += work.rows * stride;
    }
    const int64_t depth = works[0].matrices->depth;
    parallel_for(all.size(), threads, [&](int64_t n) {
        const Rows &r = all[n];
        for (int64_t i = 0; i < r.rows.count(); i++) {
            const int64_t row = r.rows.at(i);
            interleave<T>(r.to + row * stride, r.from + row * r.from_stride, r.from_stride,
                          r.rows.at(i + 1) - row, depth);
        }
    });
}

// Copies the rows of `works` to `to`, and sets their `wide`.
template <typename T> static void widen_rows(std::vector<Work<T>> &works, float *to, int threads) {
    const int64_t depth = works[0].matrices->depth, whole = wide_depth(depth);
    struct Panel {
        const T *x;
        int64_t x_stride, height;
        float *to;
    };
    std::vector<Panel> all;
    for (auto &work : works) {
        if (work.rows < WIDE_ROWS) continue;
        const Blocks<T> blocks(work.rows);
        work.wide = to;
        for (int64_t i = 0; i < blocks.count; i++)
            for (int64_t n = 0; n < blocks[i].count(); n++) {
                const int64_t row = blocks[i].at(n), height = blocks[i].at(n + 1) - row;
                all.push_back({work.x + row * work.x_stride, work.x_stride, height, to});
                to += height * whole;
            }
    }
    parallel_for(all.size(), threads, [&](int64_t n) {
        const Panel &p = all[n];
        constexpr int64_t S = STEP<float>;
        for (int64_t r = 0; r < p.height; r++)
            widen_steps(p.to + r * S, p.height * S, p.x + r * p.x_stride, depth);
    });
}

template <typename T>
static void multiply_together(std::vector<Work<T>> &works, int threads) {
    const int64_t depth = works[0].matrices->depth;
    const int64_t stride = (depth + STEP<T> - 1) / STEP<T> * STEP<T>;
    int64_t rows = 0, wide_rows = 0;
    const bool widens = IS_BF16<T> && uses_floats();
    for (const auto &work : works) wide_rows += widens && work.rows >= WIDE_ROWS ? work.rows : 0;
    const Scratch<float> wide(wide_rows * wide_depth(depth));
    if constexpr (IS_BF16<T>)
        if (wide_rows) widen_rows(works, wide.data, threads);
    for (auto &work : works) {
        if constexpr (std::is_same_v<Input<T>, T>) work.input = work.x;
        rows += wants_interleaving(work) ? work.rows : 0;
    }
    const Scratch<Input<T>> panels(rows * stride);
    if (rows) interleave_rows(works, panels.data, stride, threads);
    const Pieces<T> pieces(works);
    share_out(pieces.count(), threads, [&](int) {
        return [&, last = (int64_t)-2](int64_t n, int64_t range_end) mutable {
            const auto piece = pieces[n];
            const bool more = n + 1 < range_end;
            Strip after;
            if (more) after = pieces[n + 1].strip;
            run(*piece.work, piece.strip, more ? &after : nullptr, piece.rows.begin,
                piece.rows.end, n != last + 1);
            last = n;
        };
    });
}

// Groups of rows, to be multiplied with matrices `first` to `first + count` of each.
template <typename T> struct Groups {
    const T *x;
    int64_t x_stride;
    const RowGroup *groups;
    int64_t num_groups;
    int first, count;

    const Matrix *matrices(int64_t g) const { return groups[g].matrices + first; }
    int64_t cols() const {
        int64_t cols = 0;
        for (int i = 0; i < count; i++) cols += matrices(0)[i].cols;
        return cols;
    }
    int threads(int asked) const {
        const int64_t numbers = cols() * matrices(0)->depth;
        int64_t rows = 0;
        for (int64_t g = 0; g < num_groups; g++) rows += groups[g].end - groups[g].begin;
        return threads_for(rows * numbers, num_groups * numbers, asked);
    }
};

template <typename T>
static void multiply_numbers(const Groups<T> &all, Output<T> out, int64_t out_stride, int threads) {
    threads = all.threads(threads);
    std::vector<Work<T>> works;
    int64_t rows = 0;
    const auto flush = [&] {
        const int64_t share = (int64_t)works.size() * all.cols() / (2 * threads);
        for (auto &work : works) work.share = share;
        if (rows) multiply_together(works, threads);
        works.clear(), rows = 0;
    };
    for (int64_t g = 0; g < all.num_groups; g++) {
        const RowGroup &group = all.groups[g];
        for (int64_t row = group.begin; row < group.end; row += CHUNK_ROWS) {
            const int64_t height = std::min(CHUNK_ROWS, group.end - row);
            if (rows + height > CHUNK_ROWS) flush();
            works.push_back({all.x + row * all.x_stride, nullptr, height, all.x_stride, false,
                             all.matrices(g), all.count, out + row * out_stride, out_stride, 0, nullptr});
            rows += height;
        }
    }
    flush();
}

// Multiplies adjacent matrices of one kind together: those with quantized activations of one group size, or
// those with float activations.
template <typename T>
static void multiply_all(Groups<T> all, Output<T> out, int64_t out_stride, int threads) {
    const auto kind = [](const Matrix &m) {
        return of_integers(m) ? m.format + 64 * m.group : 0;
    };
    if (!all.num_groups) return;
    const int count = all.count;
    for (int begin = 0, end; begin < count; begin = end) {
        const Matrix *matrices = all.groups[0].matrices;
        for (end = begin; end < count && kind(matrices[end]) == kind(matrices[begin]);) end++;
        all.first = begin, all.count = end - begin;
        if (of_integers(matrices[begin]))
            out.as_pointer([&](auto *to) {
                multiply_integers(all.x, all.x_stride, all.groups, all.num_groups, begin, end, to,
                                  out_stride, threads);
            });
        else multiply_numbers(all, out, out_stride, threads);
        out = out + all.cols();
    }
}

}  // namespace

template <typename T>
void vb::multiply_groups(const T *x, int64_t x_stride, const RowGroup *groups, int64_t num_groups,
                         int count, T *out, int64_t out_stride, int threads) {
    multiply_all(Groups<T>{x, x_stride, groups, num_groups, 0, count}, Output<T>{out, false},
                 out_stride, threads);
}

template <typename T>
void vb::multiply(const T *x, int64_t rows, int64_t x_stride, const Matrix *matrices, int count,
                  T *out, int64_t out_stride, int threads) {
    const RowGroup all{0, rows, matrices};
    multiply_groups(x, x_stride, &all, 1, count, out, out_stride, threads);
}

#define INSTANCES(T)                                                                               \
    template void vb::multiply_groups(const T *, int64_t, const RowGroup *, int64_t, int, T *,     \
                                      int64_t, int);                                               \
    template void vb::multiply(const T *, int64_t, int64_t, const Matrix *, int, T *, int64_t, int);
INSTANCES(float)
INSTANCES(bf16)

// Chooses how bf16 is multiplied: 1 as floats, 0 in pairs, -1 as is faster. All give the same bits.
extern "C" void vb_choose_width(int choice) { vb::chosen_width = choice; }

// Returns whether this processor multiplies pairs with the bits of floats.
extern "C" int vb_floats_agree() { return vb::floats_agree(); }

// C interface. `out_f32` keeps the result of bf16 operands in float32.
#define EXPORT_MANY(name, T)                                                                       \
    extern "C" void name(void *out, const T *x, int64_t rows, int64_t x_stride,                    \
                         const Matrix *matrices, int count, int64_t out_stride, int out_f32,       \
                         int threads) {                                                            \
        const RowGroup all{0, rows, matrices};                                                     \
        const Groups<T> groups{x, x_stride, &all, 1, 0, count};                                    \
        multiply_all(groups, Output<T>{out, out_f32 != 0}, out_stride, threads);                   \
    }

EXPORT_MANY(vb_multiply_f32, float)
EXPORT_MANY(vb_multiply_bf16, bf16)

// `count` products at once. Each has `rows` rows of x and of out, one after another, and a matrix like
// `first`, `apart` bytes after the previous one.
#define EXPORT_BATCH(name, T)                                                                      \
    extern "C" void name(T *out, const T *x, int64_t rows, const Matrix *first, int64_t count,     \
                         int64_t apart, int threads) {                                             \
        std::vector<Matrix> matrices(count, *first);                                               \
        std::vector<RowGroup> groups;                                                              \
        for (int64_t n = 0; n < count; n++) {                                                      \
            matrices[n].data = (const char *)first->data + n * apart;                              \
            groups.push_back({n * rows, (n + 1) * rows, &matrices[n]});                            \
        }                                                                                          \
        vb::multiply_groups(x, first->depth, groups.data(), count, 1, out, first->cols, threads);  \
    }

EXPORT_BATCH(vb_multiply_batch_f32, float)
EXPORT_BATCH(vb_multiply_batch_bf16, bf16)
