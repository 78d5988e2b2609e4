// Low-rank adapters in two passes over pieces of rows and matrices: first a x, then b^T (a x).

#include "lora.h"

#include <algorithm>
#include <vector>

#include "elementwise.h"

using namespace vb;

namespace {

constexpr int64_t ROWS = 16;     // rows of a piece
constexpr int64_t RANKS = 8;     // ranks of a part in the first pass
constexpr int64_t PANELS = 8;    // panels of a part in the second pass

// Some rows times one matrix of their adapter.
struct Piece {
    const LowRank *low;
    int64_t begin, end;  // rows
    int64_t col, cols, depth;
    float *inner;  // [end - begin, rank]
};

// inner[r] = a[r] x for R adjacent rows of a.
template <int R, typename T>
void dots(const T *a, int64_t depth, const T *x, float *inner) {
    f32x16 acc[R] = {};
    int64_t k = 0;
    for (; k + 16 <= depth; k += 16) {
        const f32x16 v = load(x + k);
        for (int r = 0; r < R; r++) acc[r] = fma(load(a + r * depth + k), v, acc[r]);
    }
    if (const int rest = (int)(depth - k)) {
        const f32x16 v = load_first(x + k, rest);
        for (int r = 0; r < R; r++) acc[r] = fma(load_first(a + r * depth + k, rest), v, acc[r]);
    }
    for (int r = 0; r < R; r++) inner[r] = sum(acc[r]);
}

// Adds scaling * b^T inner to one row y, in the first `width` columns of a panel.
template <typename T>
void add_panel(const T *b, int64_t rank, float scaling, const float *inner, T *y, int64_t width) {
    constexpr int N = LOW_RANK_PANEL / 16;
    f32x16 acc[N] = {};
    for (int64_t r = 0; r < rank; r++, b += LOW_RANK_PANEL) {
        const f32x16 by = splat(inner[r]);
        for (int i = 0; i < N; i++) acc[i] = fma(load(b + 16 * i), by, acc[i]);
    }
    for (int i = 0; i < N && width > 0; i++, y += 16, width -= 16) {
        if (width >= 16) store(y, load(y) + acc[i] * scaling);
        else store_first(y, load_first(y, (int)width) + acc[i] * scaling, (int)width);
    }
}

template <typename T>
void first_pass(const Piece &p, const T *x, int64_t x_stride, int64_t begin, int64_t end) {
    const int64_t rank = p.low->rank;
    const T *a = (const T *)p.low->a;
    for (int64_t row = p.begin; row < p.end; row++) {
        const T *of_row = x + row * x_stride;
        float *inner = p.inner + (row - p.begin) * rank;
        int64_t r = begin;
        for (; r + 8 <= end; r += 8) dots<8>(a + r * p.depth, p.depth, of_row, inner + r);
        for (; r < end; r++) dots<1>(a + r * p.depth, p.depth, of_row, inner + r);
    }
}

template <typename T>
void second_pass(const Piece &p, T *out, int64_t out_stride, int64_t begin, int64_t end) {
    const int64_t rank = p.low->rank;
    for (int64_t panel = begin; panel < end; panel++) {
        const T *b = (const T *)p.low->b + panel * rank * LOW_RANK_PANEL;
        const int64_t at = panel * LOW_RANK_PANEL, width = std::min(LOW_RANK_PANEL, p.cols - at);
        for (int64_t row = p.begin; row < p.end; row++)
            add_panel(b, rank, p.low->scaling, p.inner + (row - p.begin) * rank,
                      out + row * out_stride + p.col + at, width);
    }
}

int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Calls f(piece, begin, end) for each piece, in parts of at most `size` of its `units`.
template <typename U, typename F>
void each_part(const std::vector<Piece> &pieces, int64_t size, int threads, U units, F f) {
    if (threads == 1) {
        for (const Piece &p : pieces) f(p, (int64_t)0, units(p));
        return;
    }
    struct Part {
        const Piece *piece;
        int64_t begin, end;
    };
    std::vector<Part> all;
    for (const Piece &p : pieces)
        for (int64_t begin = 0; begin < units(p); begin += size)
            all.push_back({&p, begin, std::min(begin + size, units(p))});
    parallel_for(all.size(), threads, [&](int64_t i) { f(*all[i].piece, all[i].begin, all[i].end); });
}

}  // namespace

template <typename T>
void vb::add_low_rank(const T *x, int64_t x_stride, const AdaptedRows *groups, int64_t num_groups,
                      int64_t first, const Matrix *matrices, int count, T *out, int64_t out_stride,
                      int threads) {
    std::vector<Piece> pieces;
    int64_t inner = 0, numbers = 0, products = 0;
    for (int64_t g = 0; g < num_groups; g++) {
        int64_t col = 0;
        for (int i = 0; i < count; col += matrices[i++].cols) {
            const LowRank *low = groups[g].matrices + first + i;
            if (!low->a) continue;
            const int64_t cols = matrices[i].cols, depth = matrices[i].depth;
            numbers += low->rank * (cols + depth);
            products += (groups[g].end - groups[g].begin) * low->rank * (cols + depth);
            for (int64_t row = groups[g].begin; row < groups[g].end; row += ROWS) {
                const int64_t end = std::min(row + ROWS, groups[g].end);
                pieces.push_back({low, row, end, col, cols, depth, nullptr});
                inner += (end - row) * low->rank;
            }
        }
    }
    if (pieces.empty()) return;
    // A running team is worth using for small pieces, too.
    threads = numbers < (1 << 15) ? 1 : Team::mine ? Team::mine->size : threads_for(products, numbers, threads);
    const Scratch<float> room(inner);
    float *at = room.data;
    for (Piece &p : pieces) {
        p.inner = at;
        at += (p.end - p.begin) * p.low->rank;
    }
    each_part(
        pieces, RANKS, threads, [](const Piece &p) { return p.low->rank; },
        [&](const Piece &p, int64_t begin, int64_t end) { first_pass(p, x, x_stride, begin, end); });
    each_part(
        pieces, PANELS, threads, [](const Piece &p) { return parts(p.cols, LOW_RANK_PANEL); },
        [&](const Piece &p, int64_t begin, int64_t end) {
            second_pass(p, out, out_stride, begin, end);
        });
}

#define INSTANCE(suffix, T)                                                                        \
    template void vb::add_low_rank(const T *, int64_t, const AdaptedRows *, int64_t, int64_t,      \
                                   const Matrix *, int, T *, int64_t, int);                        \
    /* C interface, for one matrix [cols, depth]. */                                               \
    extern "C" void vb_add_low_rank_##suffix(const T *x, int64_t x_stride,                         \
                                             const AdaptedRows *groups, int64_t num_groups,        \
                                             int64_t cols, int64_t depth, T *out,                  \
                                             int64_t out_stride, int threads) {                    \
        Matrix m{};                                                                                \
        m.cols = cols, m.depth = depth;                                                            \
        add_low_rank(x, x_stride, groups, num_groups, 0, &m, 1, out, out_stride, threads);         \
    }
INSTANCE(f32, float)
INSTANCE(bf16, bf16)
