// The functions of sampling.cpp for other kernels.
#pragma once

#include <cstdint>

namespace vb::sampling {

struct SampleRow {  // must match the ctypes structure in sampling/fast.py
    uint64_t seed;
    int64_t logits_row;   // several samples may be drawn from one row of logits
    const float *edited;  // the row after penalties, biases and bans; null: unchanged
    int64_t target;       // an id to score without drawing; -1: draw
    int64_t top_k;        // 0: all
    double top_p, min_p;
    float temperature;
    uint32_t sample_index, position;
    int32_t num_top;
    int32_t id;  // results from here on
    float logprob, sampled_logprob;
    int32_t found_top;
};

}  // namespace vb::sampling

extern "C" void vb_sample_rows(const void *logits, int is_bf16, int64_t stride, int64_t num_rows,
                               int64_t vocab, vb::sampling::SampleRow *rows, int32_t *top_ids,
                               float *top_logprobs, int64_t top_stride, int num_threads);
