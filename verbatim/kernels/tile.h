// Tiles of a product with w[N, K]: a few rows times two to four columns. An element has sixteen float lanes
// along K, summed at the end by the tree of vb::sum.
//
// Wherever the weights come from (read in place, unpacked to a panel, or dequantized in registers), an
// element is computed by the same steps along K in the same order, so it has the same bits.
#pragma once

#include "step.h"

namespace {

// A row of three columns takes the space of four, so that sixteen sums are whole rows.
constexpr int places(int cols) { return cols == 3 ? 4 : cols; }

// The accumulators of a tile: R rows by C columns, row by row. Four are summed at a time, so their number is
// rounded up to a multiple of four.
template <int R, int C> struct Accumulators {
    static constexpr int WIDTH = places(C), COUNT = R * WIDTH, FOURS = (COUNT + 3) / 4;
    f32x16 at[FOURS][4];
    INLINE inline f32x16 &of(int r, int c) { return at[(r * WIDTH + c) / 4][(r * WIDTH + c) % 4]; }
    INLINE inline void clear() {
        each<FOURS * 4>([&](auto i) INLINE { at[i / 4][i % 4] = f32x16{}; });
    }
};

// ---- operands and outputs of tiles ----

// A panel of rows and a strip of columns. It is created once for many tiles: storing it for each and loading
// it immediately would delay every tile until the one before it is done.
template <typename T, typename X = Input<T>> struct Place {
    const X *x;              // element k of row r at r * x_row + k * x_step, k a whole number of steps
    int64_t x_row, x_step;   // if interleaved: STEP and the number of rows
    int64_t depth;
    const T *bias;  // of the first column, or null
    Output<T> out;  // of the first row and column
    int64_t out_stride;
};

// The columns of a tile: the first one, and the distance to the next. Those from the `count`th on don't
// exist: they repeat the last one and are not stored.
struct Columns {
    int64_t first, apart;
    int count;
};

template <int C, typename T, typename X>
static INLINE inline void finish(const Place<T, X> &p, const Columns &at, f32x16 v, int row,
                                 int rows) {
    constexpr int WIDTH = places(C);
    if (p.bias) {
        float b[16] = {};
        for (int c = 0; c < at.count; c++) b[c] = to_float(p.bias[at.first + c * at.apart]);
        for (int i = WIDTH; i < 16; i++) b[i] = b[i - WIDTH];
        v += load(b);
    }
    const int64_t stride = p.out_stride;
    (p.out + (row * stride + at.first)).as_pointer([&](auto *out) INLINE {
        std::remove_pointer_t<decltype(out)> lanes[16];
        store(lanes, v);
        for (int r = 0; r < rows; r++, out += stride) {
            if (at.apart == 1 && at.count == C)
                std::memcpy(out, lanes + WIDTH * r, C * sizeof *lanes);
            else
                for (int c = 0; c < at.count; c++) out[c * at.apart] = lanes[WIDTH * r + c];
        }
    });
}

#if defined(__AVX512F__)
// ---- sums of the lanes of many accumulators at once, each by the tree of vb::sum ----

#define PICK __builtin_shufflevector

static inline f32x16 add_halves(f32x16 a, f32x16 b) {
    return PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
static inline f32x16 add_quarters(f32x16 a, f32x16 b) {
    return PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
static inline f32x16 add_neighbours(f32x16 a, f32x16 b) {
    return PICK(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           PICK(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

// Sixteen sums, of the accumulators from 4 * FIRST on.
template <int FIRST, int FOURS> static INLINE inline f32x16 sums(const f32x16 (&acc)[FOURS][4]) {
    constexpr int LEFT = FOURS - FIRST;
    f32x16 quarter[4];
    each<4>([&](auto c) INLINE {
        constexpr int C = c.value;
        f32x16 upper = add_halves(acc[FIRST][C], acc[FIRST + (LEFT > 1 ? 1 : 0)][C]);
        f32x16 lower = upper;
        if constexpr (LEFT > 2)
            lower = add_halves(acc[FIRST + 2][C], acc[FIRST + (LEFT > 3 ? 3 : 2)][C]);
        quarter[C] = add_quarters(upper, lower);
    });
    return add_neighbours(add_pairs(quarter[0], quarter[1]), add_pairs(quarter[2], quarter[3]));
}

template <int R, int C, typename T, typename X>
static INLINE inline void finish_all(const Place<T, X> &p, const Columns &at,
                                     const Accumulators<R, C> &acc) {
    constexpr int EACH = 16 / places(C);
    finish<C>(p, at, sums<0>(acc.at), 0, std::min(R, EACH));
    if constexpr (R > EACH) finish<C>(p, at, sums<4>(acc.at), EACH, R - EACH);
}
#else
template <int R, int C, typename T, typename X>
static INLINE inline void finish_all(const Place<T, X> &p, const Columns &at,
                                     Accumulators<R, C> &acc) {
    each<R>([&](auto r) INLINE {
        each<C>([&](auto c) INLINE {
            if (c >= at.count) return;
            const int64_t col = at.first + c * at.apart;
            const float bias = p.bias ? to_float(p.bias[col]) : 0.0f;
            const float total = sum(acc.of(r, c));
            (p.out + r * p.out_stride + col).as_pointer([&](auto *out) INLINE {
                put(out, p.bias ? total + bias : total);
            });
        });
    });
}
#endif

// ---- prefetching ----

constexpr int64_t AHEAD_BYTES = 2048;  // distance, for weights from memory
constexpr int64_t NEAR_BYTES = 512;    // distance, for weights from the L2 cache

// Prefetchers. `of(col)` is the one for a tile's columns; `beyond(next)` the one for their end, which fetches
// `next` bytes further on, so that the next tile finds its first weights. `bytes` is the distance.

// Fetches LINES cache lines of the next strip a step, from `at` on, `column` bytes further for each column;
// each step advances by `advance` bytes, at most as many as it fetches.
template <int LINES> struct Later {
    const char *at;
    int64_t advance, column;
    static constexpr int64_t bytes = 0;
    INLINE inline Later of(int64_t col) const { return {at + col * column, advance, column}; }
    INLINE inline Later beyond(int64_t) const { return *this; }
    template <typename T, int C>
    INLINE inline void operator()(const T *const (&)[C], int64_t k) const {
        const char *now = at + k / STEP<T> * advance;
        each<LINES>([&](auto i) INLINE { prefetch<(TO_L2 && LINES > 1)>(now + i * 64); });
    }
};

// Fetches each column's own weights, `bytes` ahead, from memory or from the L2 cache.
template <bool L2> struct Ahead {
    int64_t bytes;
    INLINE inline Ahead of(int64_t) const { return *this; }
    INLINE inline Ahead beyond(int64_t next) const { return {bytes + next}; }
    template <typename T, int C>
    INLINE inline void operator()(const T *const (&w)[C], int64_t k) const {
        each<C>([&](auto c) INLINE { prefetch<L2>((const char *)(w[c] + k) + bytes); });
    }
};
using FromMemory = Ahead<TO_L2>;
using FromL2 = Ahead<false>;

// ---- tiles ----

// Runs the steps from k to `end`, which is K, or a whole number of steps after k.
template <int R, int C, typename Fetch, typename T, typename X>
static INLINE inline void steps(Accumulators<R, C> &acc, const X *x, int64_t x_row,
                                int64_t x_step, const T *const (&w)[C], int64_t k, int64_t end,
                                Fetch fetch) {
    auto part = [&](auto number, auto load, auto load_row) INLINE {
#if !defined(__AVX512F__)  // too few registers for all weights at once
        if (number == 0) fetch(w, k);
        if constexpr (R == 1) {
            const auto a = load_row(number, x + k * x_step);
            each<C>([&](auto c) INLINE { acc.of(0, c) = mac(acc.of(0, c), a, load(number, w[c] + k)); });
            return;
        }
        f32x16 b[C];
        each<C>([&](auto c) INLINE { b[c] = load(number, w[c] + k); });
#else
        decltype(load(number, w[0])) b[C];
        each<C>([&](auto c) INLINE { b[c] = load(number, w[c] + k); });
        if (number == 0) fetch(w, k);
#endif
        each<R>([&](auto r) INLINE {
            auto a = load_row(number, x + r * x_row + k * x_step);
            each<C>([&](auto c) INLINE { acc.of(r, c) = mac(acc.of(r, c), a, b[c]); });
        });
    };
    const auto whole = [](auto number, const auto *at) INLINE { return part_of<number>(at); };
    for (; k + STEP<T> <= end; k += STEP<T>)
        each<PARTS<T>>([&](auto number) INLINE { part(number, whole, whole); });
    if (int rest = (int)(end - k)) {  // pads the step with zeros; this depends on K alone
        const auto first = [rest](auto number, const auto *at) INLINE {
            return part_of_first<number>(at, rest);
        };
        each<PARTS<T>>([&](auto number) INLINE {
            if constexpr (PARTS<T> == 2) part(number, first, whole);  // copied rows are padded
            else part(number, first, first);
        });
    }
}

// Sets `w` to the beginnings of the columns' weights, which are `apart` elements apart.
template <int C, typename W>
static INLINE inline void begins(const W *(&w)[C], const W *first, int64_t apart, int count) {
    each<C>([&](auto c) INLINE { w[c] = first + std::min(c.value, count - 1) * apart; });
}

// Computes columns `col` to `col_end` of a strip, over the part `begin` to `end` of K. All parts but the last
// are whole steps; `kept` holds the accumulators between parts.
template <int R, int C, typename Fetch, typename O, typename X, typename T>
static NOINLINE void tiles(const Place<O, X> &p, const T *weights, int64_t stride, int64_t col,
                           int64_t col_end, int64_t begin, int64_t end, f32x16 *kept, Fetch fetch) {
    const X *x = p.x;
    const int64_t x_row = p.x_row, x_step = p.x_step, depth = p.depth;
    for (; col < col_end; col += C, kept += R * places(C)) {
        const Columns at{col, 1, (int)std::min<int64_t>(C, col_end - col)};
        const T *w[C];
        begins(w, weights + col * stride, stride, at.count);
        Accumulators<R, C> acc;
        acc.clear();
        if (begin) each<R * places(C)>([&](auto i) INLINE { acc.at[i / 4][i % 4] = kept[i]; });
        const auto here = fetch.of(col);
        const int64_t size = sizeof(T), length = end - begin;
        int64_t split = begin;
        if (here.bytes) {
            split += std::max<int64_t>(0, length - here.bytes / size) / STEP<T> * STEP<T>;
            steps(acc, x, x_row, x_step, w, begin, split, here);
        }
        steps(acc, x, x_row, x_step, w, split, end, here.beyond((C * stride - length) * size));
        if (end == depth) finish_all(p, at, acc);
        else each<R * places(C)>([&](auto i) INLINE { kept[i] = acc.at[i / 4][i % 4]; });
    }
}

// What a stream reads after a column has begun: `end` bytes, and then what is `jump` bytes further on.
struct Stream {
    int64_t end, jump;
};

// Processes C columns at a time, a C-th of the strip apart: C streams. Calls f with the columns, the address
// of the first one's weights, the bytes from there to the next one's, and the rest of their streams, which
// go on in the strip at `after`. A column has `bytes` bytes of weights; the next begins `stride` bytes on.
template <int C, typename F>
static INLINE inline void each_in_streams(int64_t width, const char *first, int64_t bytes, int64_t stride,
                                          const char *after, F f) {
    const int64_t apart = (width + C - 1) / C;
    int count = (int)((width + apart - 1) / apart);
    for (int64_t c = 0; c < apart; c++, first += stride) {
        if (c + (count - 1) * apart >= width) count--;
        const int64_t left = bytes == stride ? apart - c : 1, end = (left - 1) * stride + bytes;
        const char *next = c + left < apart || !after ? first + left * stride : after;
        f(Columns{c, apart, count}, first, apart * stride, Stream{end, next - first - end});
    }
}

// Multiplies a strip from memory with interleaved rows, over all of K, each stream prefetched.
template <int R, int C, typename T>
static NOINLINE void lone_strip(const Place<T> &p, const T *weights, int64_t stride,
                                int64_t width, const char *after) {
    const Input<T> *x = p.x;
    const int64_t depth = p.depth, size = sizeof(T);
    each_in_streams<C>(width, (const char *)weights, depth * size, stride * size, after,
                       [&](Columns at, const char *first, int64_t apart, Stream stream) INLINE {
        const int64_t near = std::max<int64_t>(0, stream.end - AHEAD_BYTES) / size;
        const int64_t split = near < depth ? near / STEP<T> * STEP<T> : depth;
        const T *w[C];
        begins(w, (const T *)first, apart / size, at.count);
        Accumulators<R, C> acc;
        acc.clear();
        steps(acc, x, STEP<T>, R, w, 0, split, FromMemory{AHEAD_BYTES});
        steps(acc, x, STEP<T>, R, w, split, depth, FromMemory{AHEAD_BYTES + stream.jump});
        finish_all(p, at, acc);
    });
}

}  // namespace
