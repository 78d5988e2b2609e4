// Dequantization of matrices in 8 or 4 bits (packed.h).
//
// The output is read next by matrix products, and is larger than the caches.

#include <omp.h>

#include "packed.h"
#include "threads.h"

namespace {

template <int CODE, int GROUP, typename T>
static void rows_of(T *out, const uint8_t *packed, const RowLayout &row, int64_t rows, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads_at_once(threads))
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *codes = packed + r * row.bytes;
        unpack_row<CODE, GROUP>(out + r * row.depth, codes, row, [&](int64_t g) INLINE {
            prefetch<false>(codes + row.bytes + g * bytes_of(CODE, GROUP));
        });
    }
}

// One thread for so few numbers that waking the others would take longer.
static int threads_for(int64_t numbers, int threads) {
    if (numbers < (1 << 16)) return 1;
    return threads > 0 ? threads : omp_get_max_threads();
}

}  // namespace

// Dequantizes to out[rows, depth], bf16 or float. format: as in matrix.h. group: 32, 64 or 128.
extern "C" void vb_unpack_rows(void *out, const uint8_t *packed, int64_t rows, int64_t depth,
                               int format, int group, int out_bf16, int threads) {
    threads = threads_for(rows * depth, threads);
    const RowLayout row(depth, format, group);
    of_kind(format, group, [&](auto code, auto g) {
        if (out_bf16) rows_of<code.value, g.value>((bf16 *)out, packed, row, rows, threads);
        else rows_of<code.value, g.value>((float *)out, packed, row, rows, threads);
    });
}
