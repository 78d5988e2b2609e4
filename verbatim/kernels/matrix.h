// Matrices as the products read them, whatever form their weights are held in.
#pragma once

#include "simd.h"

namespace vb {

// INT4 and INT8: of the codes; the encoding of weight_packing.py is added 256 times.
enum Format : int32_t { FLOAT = 0, BF16 = 1, INT4 = 4, INT8 = 8, INT4_A8 = 20, INT8_A8 = 24 };

// w[cols, depth], as nn.Linear stores it; a plain one may be w[depth, cols].
struct Matrix {
    const void *data;  // FLOAT, BF16: rows of `stride` elements. INT8, INT4: rows as
                       // verbatim/model/quantize.py packs them, one after another. INT8_A8, INT4_A8:
                       // as verbatim/model/integers.py lays them; activations become codes, too
    const void *bias;  // [cols] in the activations' dtype, or null
    int64_t cols, depth, stride;
    int32_t format, group;  // group: of few bits: 32, 64 or 128
    int32_t transposed;     // w[depth, cols]
};

// Rows `begin` to `end` of x and out, and the matrices they are multiplied with.
struct RowGroup {
    int64_t begin, end;
    const Matrix *matrices;
};

// out[rows, all cols, one matrix after another] = x[rows, depth] @ w^T + bias, for `count` matrices
// that read the same x. T is float or bf16, and so are plain matrices; strides are of rows, in
// elements; `threads` 0 takes OpenMP's number. Every element has the bits that it has in a product of
// its own, and those of INT8 and INT4 have those of the matrix that they are read back as.
template <typename T>
void multiply(const T *x, int64_t rows, int64_t x_stride, const Matrix *matrices, int count, T *out,
              int64_t out_stride, int threads);

// The same for groups of rows, each with `count` matrices of its own, which are alike in all groups.
// What lies between groups is not written.
template <typename T>
void multiply_groups(const T *x, int64_t x_stride, const RowGroup *groups, int64_t num_groups,
                     int count, T *out, int64_t out_stride, int threads);

}  // namespace vb
