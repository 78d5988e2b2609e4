// Matrices in 8 or 4 bits, made numbers again: low + scale * code for each group of a contraction.
//
// `verbatim/model/quantize.py` tells how they lie, and `groups.py` says the same in torch, bit for
// bit: the product is exact in a float (8 bits times 8), so the sum is rounded once whether it is fused or not.
//
// What is written is read next by matrix products, and is larger than the caches.

#include <omp.h>

#include "packed.h"
#include "threads.h"

namespace {

// ---- w[rows, depth], groups along a row ----

template <int BITS, int GROUP, typename T>
static void rows_of(T *out, const uint8_t *packed, int64_t rows, int64_t depth, int threads) {
    const RowLayout row(depth, BITS, GROUP);
#pragma omp parallel for schedule(static) num_threads(threads_at_once(threads))
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *codes = packed + r * row.bytes;
        unpack_row<BITS, GROUP>(out + r * depth, codes, row, [&](int64_t g) INLINE {
            __builtin_prefetch(codes + row.bytes + g * (GROUP * BITS / 8));
        });
    }
}

// ---- w[depth, cols] ----

template <int BITS, typename T>
static void columns_of(T *out, const uint8_t *packed, int64_t batch, int64_t depth, int64_t cols,
                       int group, int threads) {
    const int64_t groups = (depth + group - 1) / group, strips = (cols + STRIP - 1) / STRIP;
    const int64_t group_bytes = cols * (4 + group * BITS / 8);
    const int64_t matrix_bytes = cols * ((depth * BITS + 7) / 8 + groups * 4);
#pragma omp parallel for schedule(static) collapse(3) num_threads(threads_at_once(threads))
    for (int64_t b = 0; b < batch; b++)
        for (int64_t g = 0; g < groups; g++)
            for (int64_t n = 0; n < strips; n++)
                unpack_columns<BITS>(out + (b * depth + g * group) * cols + n * STRIP, cols,
                                     packed + b * matrix_bytes + g * group_bytes,
                                     (int)std::min<int64_t>(group, depth - g * group), cols,
                                     n * STRIP, std::min(cols, (n + 1) * STRIP));
}

// Waking the other threads takes longer than this many numbers.
static int threads_for(int64_t numbers, int threads) {
    if (numbers < (1 << 16)) return 1;
    return threads > 0 ? threads : omp_get_max_threads();
}

}  // namespace

// out[rows, depth], bf16 or float. `bits` is 8 or 4, `group` 32, 64 or 128. `threads` 0 takes OpenMP's.
extern "C" void vb_unpack_rows(void *out, const uint8_t *packed, int64_t rows, int64_t depth,
                               int bits, int group, int out_bf16, int threads) {
    threads = threads_for(rows * depth, threads);
    of_kind(bits, group, [&](auto b, auto g) {
        if (out_bf16) rows_of<b.value, g.value>((bf16 *)out, packed, rows, depth, threads);
        else rows_of<b.value, g.value>((float *)out, packed, rows, depth, threads);
    });
}

// out[batch, depth, cols], as above.
extern "C" void vb_unpack_columns(void *out, const uint8_t *packed, int64_t batch, int64_t depth,
                                  int64_t cols, int bits, int group, int out_bf16, int threads) {
    threads = threads_for(batch * depth * cols, threads);
    const auto run = [&](auto *to, auto of) { of(to, packed, batch, depth, cols, group, threads); };
    if (bits == 8 && out_bf16) run((bf16 *)out, columns_of<8, bf16>);
    else if (bits == 8) run((float *)out, columns_of<8, float>);
    else if (out_bf16) run((bf16 *)out, columns_of<4, bf16>);
    else run((float *)out, columns_of<4, float>);
}
