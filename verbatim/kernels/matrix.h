// Matrices as operands of products, in any weight format.
#pragma once

#include "simd.h"

namespace vb {

// Formats. INT4 and INT8 give the bits of codes; 256 times the `Encoding` in packing.py is added.
enum Format : int32_t { FLOAT = 0, BF16 = 1, INT4 = 4, INT8 = 8, INT4_A8 = 20, INT8_A8 = 24 };

// w[cols, depth], as in nn.Linear; a plain (FLOAT or BF16) one may be w[depth, cols].
struct Matrix {
    const void *data;  // FLOAT, BF16: rows of `stride` elements. INT8, INT4: rows packed by
                       // verbatim/quantization/matrix.py, one after another. INT8_A8, INT4_A8: in the layout of
                       // verbatim/quantization/integers.py; activations are quantized, too
    const void *bias;  // [cols] in the activations' dtype, or null
    int64_t cols, depth, stride;
    int32_t format, group;  // group: size of a quantized group: 32, 64 or 128
    int32_t transposed;     // w[depth, cols]
};

// Rows `begin` to `end` of x and out, and the matrices to multiply them with.
struct RowGroup {
    int64_t begin, end;
    const Matrix *matrices;
};

// out[rows, all cols, one matrix after another] = x[rows, depth] @ w^T + bias, for `count` matrices with the
// same input x. T is float or bf16, and so are plain matrices; strides are of rows, in elements; `threads` 0
// takes OpenMP's number. Every element has the bits of a separate product; with INT8 and INT4, those of a
// product with the dequantized matrix.
template <typename T>
void multiply(const T *x, int64_t rows, int64_t x_stride, const Matrix *matrices, int count, T *out,
              int64_t out_stride, int threads);

// The same for groups of rows, each with `count` matrices of its own, of the same shapes and formats in all
// groups. Rows between groups are not written.
template <typename T>
void multiply_groups(const T *x, int64_t x_stride, const RowGroup *groups, int64_t num_groups,
                     int count, T *out, int64_t out_stride, int threads);

}  // namespace vb
