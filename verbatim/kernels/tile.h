// Tiles of a product with w[N, K]: a few rows by two to four columns, sixteen float lanes along K
// for each element, summed at the end by the tree of vb::sum.
//
// Whatever way the weights come (from where they lie, from a panel they were unpacked to, or out of
// few bits in registers), an element is the same steps along K in the same order, so it has the same
// bits.
#pragma once

#include "columns.h"

namespace {

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
static inline f32x16 add_pairs(f32x16 a, f32x16 b) {
    return PICK(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           PICK(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
static inline f32x16 add_neighbours(f32x16 a, f32x16 b) {
    return PICK(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           PICK(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

// A row of three columns has the places of four, so that sixteen sums are whole rows.
constexpr int places(int cols) { return cols == 3 ? 4 : cols; }

// A tile's accumulators: R rows by C columns, row by row. Four are summed at a time, so there are a
// few more where that does not come out even.
template <int R, int C> struct Accumulators {
    static constexpr int WIDTH = places(C), COUNT = R * WIDTH, FOURS = (COUNT + 3) / 4;
    f32x16 at[FOURS][4];
    INLINE inline f32x16 &of(int r, int c) { return at[(r * WIDTH + c) / 4][(r * WIDTH + c) % 4]; }
    INLINE inline void clear() {
        each<FOURS * 4>([&](auto i) INLINE { at[i / 4][i % 4] = f32x16{}; });
    }
};

// Sixteen sums, from four times FIRST on.
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

// ---- where a tile reads and writes ----

// Its columns lie `apart` from one another in the bias and the output. Those from the `cols`th on do
// not exist: they repeat the last one and are not stored.
template <typename T, typename O> struct Place {
    const T *x;  // of the first row
    int64_t x_stride, depth;
    const T *bias;  // of the first column, or null
    O *out;         // of the first row and column
    int64_t out_stride, apart;
    int cols;
};

template <int C, typename T, typename O>
static inline void finish(const Place<T, O> &p, f32x16 v, int row, int rows) {
    constexpr int WIDTH = places(C);
    if (p.bias) {
        float b[16] = {};
        for (int c = 0; c < p.cols; c++) b[c] = to_float(p.bias[c * p.apart]);
        for (int i = WIDTH; i < 16; i++) b[i] = b[i - WIDTH];
        v += load(b);
    }
    O lanes[16];
    store_all(lanes, v);
    O *out = p.out + row * p.out_stride;
    for (int r = 0; r < rows; r++, out += p.out_stride) {
        if (p.apart == 1 && p.cols == C) std::memcpy(out, lanes + WIDTH * r, C * sizeof(O));
        else
            for (int c = 0; c < p.cols; c++) out[c * p.apart] = lanes[WIDTH * r + c];
    }
}

template <int R, int C, typename T, typename O>
static INLINE inline void finish_all(const Place<T, O> &p, const Accumulators<R, C> &acc) {
    constexpr int EACH = 16 / places(C);
    finish<C>(p, sums<0>(acc.at), 0, std::min(R, EACH));
    if constexpr (R > EACH) finish<C>(p, sums<4>(acc.at), EACH, R - EACH);
}

// ---- what is brought into the cache meanwhile ----

constexpr int64_t AHEAD_BYTES = 2048;  // of what comes from memory
constexpr int64_t NEAR_BYTES = 512;    // of what comes from the second cache

// LINES lines a step from `at` on, `stride` bytes apart.
template <int LINES> struct Later {
    const char *at;
    int64_t stride;
    template <typename T, int C>
    INLINE inline void operator()(const T *const (&)[C], int64_t k) const {
        each<LINES>([&](auto i) INLINE {
            __builtin_prefetch(at + i * stride + k * (64 / STEP<T>));
        });
    }
};

// Each column's own weights, so many bytes ahead.
struct Ahead {
    int64_t bytes;
    template <typename T, int C>
    INLINE inline void operator()(const T *const (&w)[C], int64_t k) const {
        each<C>([&](auto c) INLINE { __builtin_prefetch((const char *)(w[c] + k) + bytes); });
    }
};

// ---- tiles ----

// Steps from k to `end`, which is K, or a whole number of steps from k.
template <int R, int C, typename Fetch, typename T>
static INLINE inline void steps(Accumulators<R, C> &acc, const T *x, int64_t x_stride,
                                const T *const (&w)[C], int64_t k, int64_t end, Fetch fetch) {
    auto step = [&](auto load) INLINE {
        decltype(load(x)) b[C];
        each<C>([&](auto c) INLINE { b[c] = load(w[c] + k); });
        fetch(w, k);
        each<R>([&](auto r) INLINE {
            auto a = load(x + r * x_stride + k);
            each<C>([&](auto c) INLINE { acc.of(r, c) = mac(acc.of(r, c), a, b[c]); });
        });
    };
    for (; k + STEP<T> <= end; k += STEP<T>) step([](const T *at) INLINE { return load_step(at); });
    if (int rest = (int)(end - k))  // zeros fill the step up: this depends on K alone
        step([rest](const T *at) INLINE { return load_step_first(at, rest); });
}

// Where the columns' weights begin, `stride` elements from one to the next.
template <int C, typename W, typename T, typename O>
static INLINE inline void begins(const W *(&w)[C], const Place<T, O> &p, const W *first,
                                 int64_t stride) {
    for (int c = 0; c < C; c++) w[c] = first + std::min(c, p.cols - 1) * stride;
}

// Part of K: from `begin` to `end`. All but the last part are whole steps; `kept` has the
// accumulators between parts.
template <int R, int C, typename Fetch, typename T, typename O>
static NOINLINE void tile(const Place<T, O> &p, const T *first, int64_t stride, int64_t begin,
                          int64_t end, f32x16 *kept, Fetch fetch) {
    const T *w[C];
    begins(w, p, first, stride);
    Accumulators<R, C> acc;
    acc.clear();
    if (begin) each<acc.COUNT>([&](auto i) INLINE { acc.at[i / 4][i % 4] = kept[i]; });
    steps(acc, p.x, p.x_stride, w, begin, end, fetch);
    if (end < p.depth) each<acc.COUNT>([&](auto i) INLINE { kept[i] = acc.at[i / 4][i % 4]; });
    else finish_all(p, acc);
}

// All of K, from memory: C streams, each fetched ahead. Within the last bytes of a column that means
// the column after it, `next` bytes from this one.
template <int R, int C, typename T, typename O>
static NOINLINE void lone_tile(const Place<T, O> &p, const T *first, int64_t stride, int64_t next) {
    const T *w[C];
    begins(w, p, first, stride);
    Accumulators<R, C> acc;
    acc.clear();
    const int64_t ahead = AHEAD_BYTES / (int64_t)sizeof(T);
    const int64_t split = std::max<int64_t>(0, (p.depth - ahead) / STEP<T> * STEP<T>);
    const int64_t over = next + AHEAD_BYTES - p.depth * (int64_t)sizeof(T);
    steps(acc, p.x, p.x_stride, w, 0, split, Ahead{AHEAD_BYTES});
    steps(acc, p.x, p.x_stride, w, split, p.depth, Ahead{over});
    finish_all(p, acc);
}

}  // namespace
