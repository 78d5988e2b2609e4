// Integer products: quantized weights and activations in 8 bits.
//
// Of a row x and a group of K: xs = max|x| / 127 and the codes round(x * (127 / max|x|)), to even. A group
// whose largest is below 2^-100 is zero; one with a NaN or an infinity in it makes its row NaN. A
// weight is low + scale * code. So a group contributes
//
//   xs * (scale * D + low * S)      D: the sum of both codes' products, S: of the activations' codes
//
// in float, each step rounded, and contributions are added in the order of the groups. D and S are exact,
// so this is the same on every instruction set. verbatim/model/integers.py says it in torch.
#pragma once

#include "matrix.h"

namespace vb {

static inline bool of_integers(const Matrix &m) {
    return m.format == INT8_A8 || m.format == INT4_A8;
}

// As `multiply_groups`, with matrices `first` to `last` of each group, which are all `of_integers` and have
// one size of groups. O is T or float.
template <typename T, typename O>
void multiply_integers(const T *x, int64_t x_stride, const RowGroup *groups, int64_t num_groups,
                       int first, int last, O *out, int64_t out_stride, int threads);

}  // namespace vb
