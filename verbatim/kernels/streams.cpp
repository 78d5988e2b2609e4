// Residual streams of a layer (manifold-constrained hyper-connections, Xie et al. 2026).
//
// A row's factors are computed from a matrix product of all its streams. Sums over streams run in the order
// of `tree_sum` (kv/recurrence.py), so the torch version is bit-identical.

#include "elementwise.h"

using namespace vb;

namespace {

constexpr int64_t MOST = 8;  // maximum number of streams

// Returns the tree sum of v[n], which is overwritten.
template <typename V> static inline V tree_sum(V *v, int64_t n) {
    while (n > 1) {
        const int64_t half = n / 2;
        for (int64_t i = 0; i < half; i++) v[i] = v[i] + v[half + i];
        if (n % 2) v[half] = v[n - 1];
        n -= half;
    }
    return v[0];
}

// Divides x[n], with elements `step` apart, by its sum plus eps.
static inline void divide_by_sum(float *x, int64_t n, int64_t step, float eps) {
    float parts[MOST];
    for (int64_t i = 0; i < n; i++) parts[i] = x[i * step];
    const float total = tree_sum(parts, n) + eps;
    for (int64_t i = 0; i < n; i++) x[i * step] /= total;
}

// Replaces x[n, n] by the softmax of its rows, made doubly stochastic by Sinkhorn's iterations.
static void balance(float *x, int64_t n, int64_t iterations, float eps) {
    for (int64_t i = 0; i < n; i++) {
        float *row = x + i * n, most = row[0];
        for (int64_t j = 1; j < n; j++) most = row[j] > most || row[j] != row[j] ? row[j] : most;
        store_first(row, exponential(load_first(row, (int)n) - most), (int)n);
        divide_by_sum(row, n, 1, 0.0f);
        for (int64_t j = 0; j < n; j++) row[j] += eps;
    }
    for (int64_t j = 0; j < n; j++) divide_by_sum(x + j, n, n, eps);
    for (int64_t turn = 1; turn < iterations; turn++) {
        for (int64_t i = 0; i < n; i++) divide_by_sum(x + i * n, n, 1, eps);
        for (int64_t j = 0; j < n; j++) divide_by_sum(x + j, n, n, eps);
    }
}

template <typename T>
void collapse(const float *mixes, const float *scale, const float *base, const T *streams,
              float *after, float *between, T *out, int64_t rows, int64_t n, int64_t width,
              int64_t iterations, float eps, float after_scale, float after_eps, int threads) {
    each_row(rows, n * width, threads, [&](int64_t r) {
        const int64_t count = between ? (2 + n) * n : 2 * n;
        float values[(2 + MOST) * MOST], factors[16];
        for (int64_t i = 0; i < count; i++)
            values[i] = mixes[r * count + i] * scale[i < n ? 0 : i < 2 * n ? 1 : 2] + base[i];
        store(factors, sigmoid(load_first(values, (int)n)) + eps);
        const f32x16 behind = sigmoid(load_first(values + n, (int)n));
        store_first(after + r * n, after_scale * behind + after_eps, (int)n);
        if (between) {
            balance(values + 2 * n, n, iterations, eps);
            std::memcpy(between + r * n * n, values + 2 * n, n * n * sizeof(float));
        }
        const T *row = streams + r * n * width;
        each_lane(out + r * width, width, [&](auto at) {
            f32x16 parts[MOST];
            for (int64_t j = 0; j < n; j++) parts[j] = factors[j] * at(row + j * width);
            return tree_sum(parts, n);
        });
    });
}

template <typename T>
void expand(const T *streams, const T *made, const float *after, const float *between, T *out,
            int64_t rows, int64_t n, int64_t width, int threads) {
    const auto factor = [](float x) { return rounded<T>(splat(x)); };
    each_row(rows, n * width, threads, [&](int64_t r) {
        const T *row = streams + r * n * width;
        for (int64_t i = 0; i < n; i++) {
            const float *column = between + r * n * n + i;
            T *to = out + (r * n + i) * width;
            if (!between) {
                each_lane(to, width, [&](auto at) {
                    return after[r * n + i] * at(made + r * width) + at(row + i * width);
                });
                continue;
            }
            each_lane(to, width, [&](auto at) {
                f32x16 mixed = factor(column[0]) * at(row);
                for (int64_t j = 1; j < n; j++)
                    mixed = mixed + factor(column[j * n]) * at(row + j * width);
                return rounded<T>(factor(after[r * n + i]) * at(made + r * width)) +
                       rounded<T>(mixed);
            });
        }
    });
}

}  // namespace

// Computes from mixes * scale + base, [(2 + n) n] per row: the factors of the streams [n, width] in their
// weighted sum `out` [width]; after [n], the factors of the layer's output; and between [n, n], which mixes
// the streams. If streams are not mixed, there are 2 n mixes, and `between` is null.
#define EXPORT_COLLAPSE(name, T)                                                                   \
    extern "C" void name(const float *mixes, const float *scale, const float *base,                \
                         const T *streams, float *after, float *between, T *out, int64_t rows,     \
                         int64_t n, int64_t width, int64_t iterations, float eps,                  \
                         float after_scale, float after_eps, int threads) {                        \
        collapse(mixes, scale, base, streams, after, between, out, rows, n, width, iterations,     \
                 eps, after_scale, after_eps, threads);                                            \
    }
EXPORT_COLLAPSE(vb_collapse_streams_f32, float)
EXPORT_COLLAPSE(vb_collapse_streams_bf16, bf16)

// out [rows, n, width] = after * the layer's output [rows, width] + the mixed streams.
#define EXPORT_EXPAND(name, T)                                                                     \
    extern "C" void name(const T *streams, const T *made, const float *after,                      \
                         const float *between, T *out, int64_t rows, int64_t n, int64_t width,     \
                         int threads) {                                                            \
        expand(streams, made, after, between, out, rows, n, width, threads);                       \
    }
EXPORT_EXPAND(vb_expand_streams_f32, float)
EXPORT_EXPAND(vb_expand_streams_bf16, bf16)
