// Adapters of low rank (LoRA; Hu et al. 2021, arXiv:2106.09685) for some rows of a product.
#pragma once

#include "matrix.h"

namespace vb {

// What is added to a row y of a product with x: scaling * b^T (a x), the inner product in float.
struct LowRank {
    const void *a;  // [rank, depth] in the activations' dtype; null: nothing is added
    const void *b;  // [cols / LOW_RANK_PANEL, rank, LOW_RANK_PANEL], filled up with zeros
    int64_t rank;
    float scaling;
};
constexpr int64_t LOW_RANK_PANEL = 64;

// Rows `begin` to `end` of a forward, and the matrices of their adapter.
struct AdaptedRows {
    int64_t begin, end;
    const LowRank *matrices;
};

// Add to `out`, the product of x with `count` matrices side by side, what each row's adapter has for them;
// the first of its matrices is at `first`. out = round(out + scaling * b^T (a x)) by a fixed order of the
// arithmetic of each element, so that its bits depend on its row alone. Strides are of rows, in elements.
template <typename T>
void add_low_rank(const T *x, int64_t x_stride, const AdaptedRows *groups, int64_t num_groups,
                  int64_t first, const Matrix *matrices, int count, T *out, int64_t out_stride,
                  int threads);

}  // namespace vb
