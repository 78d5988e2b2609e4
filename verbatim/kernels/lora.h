// Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685) for some rows of a product.
#pragma once

#include "matrix.h"

namespace vb {

// An adapter of one matrix: adds scaling * b^T (a x) to the product with x, with a x in float.
struct LowRank {
    const void *a;  // [rank, depth] in the activations' dtype; null: nothing is added
    const void *b;  // [cols / LOW_RANK_PANEL, rank, LOW_RANK_PANEL], padded with zeros
    int64_t rank;
    float scaling;
};
constexpr int64_t LOW_RANK_PANEL = 64;

// Rows `begin` to `end` of a forward, and their adapter's matrices.
struct AdaptedRows {
    int64_t begin, end;
    const LowRank *matrices;
};

// Adds the rows' adapters to `out`, the product of x with `count` matrices side by side: out = round(out +
// scaling * b^T (a x)). `first` is the index of the first one's adapter matrix. The order of operations is
// fixed for each element, so its bits depend on its row alone. Strides are of rows, in elements.
template <typename T>
void add_low_rank(const T *x, int64_t x_stride, const AdaptedRows *groups, int64_t num_groups,
                  int64_t first, const Matrix *matrices, int count, T *out, int64_t out_stride,
                  int threads);

}  // namespace vb
