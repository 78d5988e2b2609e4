// Recurrent operations over the rows of many sequences: causal convolution and linear recurrences.
//
// The rows of a sequence are computed one after another; threads share sequences, heads and columns, which
// are independent. So the bits of a row depend on the state before it and on the row alone.
#pragma once

#include "simd.h"

namespace vb {

// The initial state slot of each sequence, and after which rows states are written to which slots.
struct StateRows {
    const int32_t *starts, *sources, *rows, *targets;
    int64_t sequences, writes;
};

// The operands of `linear_recurrence` in verbatim/kv/recurrence.py; [rows, heads, width] each, contiguous.
struct Recurrence {
    float *out;
    const float *q, *k, *v, *decay, *beta;  // beta: null without the delta rule
    float *state;                           // [slots, heads, depth, width]
    int64_t heads, key_heads, depth, width;
    bool decay_by_row;            // decay is [rows, heads, depth]
    const float *rate = nullptr;  // [heads, depth], only for a width of 1: the decay is exp(decay * rate)

    int64_t state_at(int64_t slot, int64_t head) const { return (slot * heads + head) * depth * width; }
};

void run_recurrence(const Recurrence &a, const StateRows &at, int threads);

// As `causal_conv` in verbatim/kv/recurrence.py: out[rows, channels] of x, with weight[channels, width], in T
// or float, and bias[channels] or null.
template <typename T>
void convolve(float *out, const T *x, const void *weight, bool weight_f32, const T *bias, T *state,
              const StateRows &at, int64_t channels, int64_t width, int threads);

}  // namespace vb
