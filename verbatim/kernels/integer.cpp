// Integer products (integer.h): the division of the work into pieces.
//
// A piece is a block of columns times some rows. It is cut along K if the weights would not stay in the L1
// cache for all of its rows. This, and the grouping of rows into tiles, affects only the time.

#include "elementwise.h"
#include "integer.h"
#include "integer_tile.h"
#include "threads.h"

namespace {

constexpr int64_t MOST_ROWS = 128, PART = 36 << 10;  // rows of a piece; bytes of weights in a part of it

// Calls f(R) with the number of rows of a tile, as a constant.
template <typename F> static inline void of_rows(int64_t rows, F f) {
    switch (rows) {
#define ROWS_ARE(R)                                                                                \
    case R: return f(std::integral_constant<int, std::min(R, TILE_ROWS)>());
        ROWS_ARE(1)
        ROWS_ARE(2)
        ROWS_ARE(3)
        ROWS_ARE(4)
        ROWS_ARE(5)
        ROWS_ARE(6)
        ROWS_ARE(7)
        ROWS_ARE(8)
#undef ROWS_ARE
    }
}

template <typename T, typename O> struct IntegerWork {
    CodeLayout layout;
    int bits;
    Codes x;
    O *out;
    int64_t out_stride;

    int64_t block_bytes() const {
        return (layout.groups + (layout.groups - 1) * layout.words + layout.rest) * WORD_BYTES;
    }

    // Multiplies block n, counted through all matrices from `m` on, with rows `begin` to `end`.
    void run(const Matrix *m, int64_t n, int64_t begin, int64_t end) const {
        int64_t out_col = 0;
        for (int64_t count; n >= (count = (m->cols + BLOCK_COLS - 1) / BLOCK_COLS); m++)
            n -= count, out_col += m->cols;
        const char *w = (const char *)m->data + n * block_bytes();
        const int64_t col = n * BLOCK_COLS, cols = std::min<int64_t>(BLOCK_COLS, m->cols - col);
        const T *bias = m->bias ? (const T *)m->bias + col : nullptr;
        with_vnni([&](auto vnni) {
            if (bits == 8) sums<8, vnni>(w, begin, end);
            else sums<4, vnni>(w, begin, end);
        });
        for (int64_t r = begin; r < end; r++) {
            O *to = out + r * out_stride + out_col + col;
            for (int v = 0; v < BLOCK_VECTORS; v++) {
                const int left = (int)std::min<int64_t>(16, cols - 16 * v);
                if (left <= 0) break;
                f32x16 sum = kept()[r - begin][v];
                if (bias) sum += left == 16 ? load(bias + 16 * v) : load_first(bias + 16 * v, left);
                if (left == 16) store(to + 16 * v, sum);
                else store_first(to + 16 * v, sum, left);
            }
        }
    }

  private:
    typedef f32x16 Sums[BLOCK_VECTORS];
    static Sums *kept() {
        alignas(64) static thread_local Sums held[MOST_ROWS];
        return held;
    }

    template <int BITS, bool VNNI> void sums(const char *w, int64_t begin, int64_t end) const {
        const int64_t rows = end - begin, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
        const int64_t group_bytes = (1 + layout.words) * WORD_BYTES;
        const int64_t parts = tiles == 1 ? 1 : (layout.groups * group_bytes + PART - 1) / PART;
        const int64_t part = (layout.groups + parts - 1) / parts;
        for (int64_t g = 0; g < layout.groups; g += part, w += part * group_bytes) {
            const int64_t stop = std::min(g + part, layout.groups);
            for (int64_t i = 0; i < tiles; i++) {
                const int64_t row = rows * i / tiles, height = rows * (i + 1) / tiles - row;
                of_rows(height, [&](auto r) {
                    if (i) integer_tile<r, BITS, false, VNNI>(x, begin + row, layout, w, g, stop,
                                                              kept() + row);
                    else integer_tile<r, BITS, true, VNNI>(x, begin, layout, w, g, stop, kept());
                });
            }
        }
    }
};

}  // namespace

template <typename T, typename O>
void vb::multiply_integers(const T *x, int64_t x_stride, const RowGroup *groups,
                           int64_t num_groups, int first, int last, O *out, int64_t out_stride,
                           int threads) {
    const Matrix *matrices = groups[0].matrices + first;
    int64_t blocks = 0, rows = 0, pieces = 0;
    for (int i = 0; i < last - first; i++)
        blocks += (matrices[i].cols + BLOCK_COLS - 1) / BLOCK_COLS;
    std::vector<int64_t> ends;  // cumulative number of pieces, by group
    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t height = groups[g].end - groups[g].begin;
        rows += height, pieces += blocks * ((height + MOST_ROWS - 1) / MOST_ROWS);
        ends.push_back(pieces);
    }
    if (!pieces) return;
    const int64_t numbers = blocks * BLOCK_COLS * matrices->depth;
    threads = threads_for(rows * numbers, num_groups * numbers, threads);
    const int bits = matrices->format == INT8_A8 ? 8 : 4;
    const CodeLayout layout(matrices->depth, matrices->group, bits);
    const int64_t all_rows = groups[num_groups - 1].end;  // the last group has the last rows
    Scratch<int8_t> codes(all_rows * layout.stride);
    Scratch<GroupHead> heads(all_rows * layout.groups);
    const IntegerWork<T, O> work{layout, bits,
                                 {codes.data, heads.data, layout.stride, layout.groups},
                                 out, out_stride};
    // Quantizing a few rows takes less time than synchronizing the threads.
    const bool together = all_rows * layout.depth >= (1 << 17);
    parallel_for(all_rows, together ? threads : 1, [&](int64_t r) {
        row_codes(codes.data + r * layout.stride, heads.data + r * layout.groups,
                  x + r * x_stride, layout);
    });
    share_out(pieces, threads, [&](int) {
        return [&](int64_t n, int64_t) {
            const size_t g = std::upper_bound(ends.begin(), ends.end(), n) - ends.begin();
            const int64_t local = n - (g ? ends[g - 1] : 0), part = local / blocks;
            const int64_t height = groups[g].end - groups[g].begin;
            const int64_t parts = (height + MOST_ROWS - 1) / MOST_ROWS;
            work.run(groups[g].matrices + first, local % blocks,
                     groups[g].begin + height * part / parts,
                     groups[g].begin + height * (part + 1) / parts);
        };
    });
}
#define INSTANCE(T, O)                                                                             \
    template void vb::multiply_integers(const T *, int64_t, const RowGroup *, int64_t, int, int,   \
                                        O *, int64_t, int);
INSTANCE(float, float)
INSTANCE(bf16, bf16)
INSTANCE(bf16, float)
