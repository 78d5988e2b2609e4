// Integer products: quantized weights and 8-bit activations.
//
// For a row x and a group along K, xs = max|x| / 127 and codes are round(x * (127 / max|x|)), ties to even. A
// group with a maximum below 2^-100 is zero; a NaN or an infinity makes its row NaN. A weight is low + scale
// * code. So a group contributes
//
//   xs * (scale * D + low * S)      D: the sum of both codes' products, S: of the activations' codes
//
// in float, each step rounded; contributions are added in the order of the groups. D and S are exact, so the
// result is the same on every instruction set. verbatim/quantization/integers.py is the torch version.
#pragma once

#include "matrix.h"

namespace vb {

static inline bool of_integers(const Matrix &m) {
    return m.format == INT8_A8 || m.format == INT4_A8;
}

// Like `multiply_groups`, with matrices `first` to `last` of each group, all `of_integers` with one group
// size. O is T or float.
template <typename T, typename O>
void multiply_integers(const T *x, int64_t x_stride, const RowGroup *groups, int64_t num_groups,
                       int first, int last, O *out, int64_t out_stride, int threads);

}  // namespace vb
