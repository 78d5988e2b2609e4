// The functions of attention.cpp for other kernels. Python calls them, too; they are declared here once, so
// that the compiler checks callers and definitions.
#pragma once

#include <cstdint>

extern "C" {

void vb_attention(const void *q, void *out, const void *k_store, const void *v_store,
                  const int32_t *query_starts, const int32_t *context_lens,
                  const int32_t *block_tables, int64_t sequences, int64_t max_blocks,
                  int64_t q_token_stride, int64_t q_head_stride, int64_t heads, int64_t kv_heads,
                  int64_t key_size, int64_t value_size, int64_t block_size, int64_t window,
                  int64_t chunk, int q_is_bf16, int kv_format, float scale, float cap,
                  const float *sinks, int64_t sink_stride, const float *slopes, const void *bias,
                  int64_t bias_size, int threads);

void vb_write_kv(const char *k, const char *v, char *k_store, char *v_store, const int64_t *slots,
                 int64_t tokens, int64_t kv_heads, int64_t block_size, int64_t k_bytes,
                 int64_t v_bytes, int64_t k_token_stride, int64_t k_head_stride,
                 int64_t v_token_stride, int64_t v_head_stride, int threads);

}  // extern "C"
