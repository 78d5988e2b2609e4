// See recurrence.h.

#include "recurrence.h"

#include "elementwise.h"

#include <type_traits>
#include <vector>

using namespace vb;

namespace {

constexpr int LANES = 16;

static inline f32x16 load_up_to(const float *p, int64_t n) {
    return n >= LANES ? load(p) : load_first(p, (int)n);
}

static inline void store_up_to(float *p, f32x16 v, int64_t n) {
    if (n >= LANES) store(p, v);
    else store_first(p, v, (int)n);
}

// The index of the first state write of sequence s.
int64_t first_write(const StateRows &at, int64_t s) {
    return std::lower_bound(at.rows, at.rows + at.writes, at.starts[s]) - at.rows;
}

// Whether the state after the first row of sequence s is written.
bool is_written(const StateRows &at, int64_t s) {
    const int64_t write = first_write(at, s);
    return write < at.writes && at.rows[write] == at.starts[s];
}

// Runs columns `first` to `first + 16 * N` of one head of one sequence; `count` of them exist.
template <int N>
void run_columns(const Recurrence &a, const StateRows &at, int64_t s, int64_t head, int64_t first,
                 int64_t count, float *memory) {
    const int64_t key_head = head / (a.heads / a.key_heads);
    const int64_t begin = at.starts[s], end = at.starts[s + 1];
    int64_t write = first_write(at, s);
    auto row_of = [&](int64_t i) { return memory + i * N * LANES; };

    const float *source = a.state + a.state_at(at.sources[s], head) + first;
    for (int64_t i = 0; i < a.depth; i++)
        for (int c = 0; c < N; c++)
            store(row_of(i) + c * LANES, load_up_to(source + i * a.width + c * LANES, count - c * LANES));

    auto key = [&](const float *x, int64_t t) { return x + (t * a.key_heads + key_head) * a.depth; };
    auto decay_of = [&](int64_t t) {
        return a.decay + (t * a.heads + head) * (a.decay_by_row ? a.depth : 1);
    };
    const int64_t step = a.decay_by_row ? 1 : 0;

    f32x16 seen[N];  // k^T S
    auto decay_and_see = [&](int64_t t) {
        const float *k = key(a.k, t), *d = decay_of(t);
        for (int c = 0; c < N; c++) seen[c] = splat(0.0f);
        for (int64_t i = 0; i < a.depth; i++)
            for (int c = 0; c < N; c++) {
                const f32x16 x = load(row_of(i) + c * LANES) * splat(d[i * step]);
                store(row_of(i) + c * LANES, x);
                seen[c] = fma(x, splat(k[i]), seen[c]);
            }
    };
    bool ready = false;  // the row's decay has been applied
    for (int64_t t = begin; t < end; t++) {
        if (!ready) decay_and_see(t);
        const int64_t at_row = (t * a.heads + head) * a.width + first;
        f32x16 value[N], out[N];
        for (int c = 0; c < N; c++) {
            value[c] = load_up_to(a.v + at_row + c * LANES, count - c * LANES);
            if (a.beta) value[c] = (value[c] - seen[c]) * splat(a.beta[t * a.heads + head]);
            out[c] = seen[c] = splat(0.0f);
        }
        const float *k = key(a.k, t), *q = key(a.q, t);
        const bool written = write < at.writes && at.rows[write] == t;
        ready = t + 1 < end && !written;
        if (ready) {  // with the first steps of the next row, in one pass over the state
            const float *next = key(a.k, t + 1), *d = decay_of(t + 1);
            for (int64_t i = 0; i < a.depth; i++)
                for (int c = 0; c < N; c++) {
                    f32x16 x = fma(splat(k[i]), value[c], load(row_of(i) + c * LANES));
                    out[c] = fma(x, splat(q[i]), out[c]);
                    x = x * splat(d[i * step]);
                    store(row_of(i) + c * LANES, x);
                    seen[c] = fma(x, splat(next[i]), seen[c]);
                }
        } else {
            for (int64_t i = 0; i < a.depth; i++)
                for (int c = 0; c < N; c++) {
                    const f32x16 x = fma(splat(k[i]), value[c], load(row_of(i) + c * LANES));
                    store(row_of(i) + c * LANES, x);
                    out[c] = fma(x, splat(q[i]), out[c]);
                }
        }
        for (int c = 0; c < N; c++) store_up_to(a.out + at_row + c * LANES, out[c], count - c * LANES);
        if (written) {
            float *target = a.state + a.state_at(at.targets[write++], head) + first;
            for (int64_t i = 0; i < a.depth; i++)
                for (int c = 0; c < N; c++)
                    store_up_to(target + i * a.width + c * LANES, load(row_of(i) + c * LANES),
                                count - c * LANES);
        }
    }
}

// Like `run_columns`, for a sequence with one row and a state write, as in decode: the state is read from one
// slot and written directly to the other. The operations of each element are the same.
template <int N>
void run_row(const Recurrence &a, const StateRows &at, int64_t s, int64_t head, int64_t first,
             int64_t count, bool stream) {
    const int64_t t = at.starts[s], key_head = head / (a.heads / a.key_heads);
    const float *source = a.state + a.state_at(at.sources[s], head) + first;
    float *target = a.state + a.state_at(at.targets[first_write(at, s)], head) + first;
    const float *k = a.k + (t * a.key_heads + key_head) * a.depth;
    const float *q = a.q + (t * a.key_heads + key_head) * a.depth;
    const float *d = a.decay + (t * a.heads + head) * (a.decay_by_row ? a.depth : 1);
    const int64_t step = a.decay_by_row ? 1 : 0, at_row = (t * a.heads + head) * a.width + first;
    auto decayed = [&](int64_t i, int c) {
        return load_up_to(source + i * a.width + c * LANES, count - c * LANES) * splat(d[i * step]);
    };
    f32x16 value[N], out[N];
    for (int c = 0; c < N; c++) {
        value[c] = load_up_to(a.v + at_row + c * LANES, count - c * LANES);
        out[c] = splat(0.0f);
    }
    if (a.beta) {
        for (int64_t i = 0; i < a.depth; i++)
            for (int c = 0; c < N; c++) out[c] = fma(decayed(i, c), splat(k[i]), out[c]);
        for (int c = 0; c < N; c++) {
            value[c] = (value[c] - out[c]) * splat(a.beta[t * a.heads + head]);
            out[c] = splat(0.0f);
        }
    }
    for (int64_t i = 0; i < a.depth; i++)
        for (int c = 0; c < N; c++) {
            const f32x16 x = fma(splat(k[i]), value[c], decayed(i, c));
            float *to = target + i * a.width + c * LANES;
            if (stream) store_past_caches(to, x);
            else store_up_to(to, x, count - c * LANES);
            out[c] = fma(x, splat(q[i]), out[c]);
        }
    if (stream) finish_stores_past_caches();
    for (int c = 0; c < N; c++) store_up_to(a.out + at_row + c * LANES, out[c], count - c * LANES);
}

// Runs heads `first` to `last`, which have a single column each; lanes are the rows of their states. States
// that are written go directly to their targets.
void run_single(const Recurrence &a, const StateRows &at, int64_t s, int64_t first, int64_t last,
                float *memory, bool stream) {
    const int64_t begin = at.starts[s], end = at.starts[s + 1], group = a.heads / a.key_heads;
    const int64_t from_write = first_write(at, s);
    for (int64_t head = first; head < last; head++) {
        const float *from = a.state + a.state_at(at.sources[s], head);
        const float *rate = a.rate ? a.rate + head * a.depth : nullptr;
        int64_t write = from_write;
        for (int64_t t = begin; t < end; t++) {
            const int64_t key = (t * a.key_heads + head / group) * a.depth;
            const float *k = a.k + key, *q = a.q + key;
            const float *d = a.decay + (t * a.heads + head) * (a.decay_by_row ? a.depth : 1);
            auto decayed = [&](int64_t i, int64_t n) {
                const f32x16 x = load_up_to(from + i, n);
                if (rate) return x * exponential(splat(d[0]) * load_up_to(rate + i, n));
                return x * (a.decay_by_row ? load_up_to(d + i, n) : splat(d[0]));
            };
            float value = a.v[t * a.heads + head];
            if (a.beta) {
                f32x16 seen = splat(0.0f);
                for (int64_t i = 0; i < a.depth; i += LANES)
                    seen = fma(decayed(i, a.depth - i), load_up_to(k + i, a.depth - i), seen);
                value = (value - sum(seen)) * a.beta[t * a.heads + head];
            }
            const bool written = write < at.writes && at.rows[write] == t;
            float *to = written ? a.state + a.state_at(at.targets[write++], head) : memory;
            f32x16 out = splat(0.0f);
            for (int64_t i = 0; i < a.depth; i += LANES) {
                const int64_t n = a.depth - i;
                const f32x16 x = fma(load_up_to(k + i, n), splat(value), decayed(i, n));
                if (stream && t + 1 == end && written) store_past_caches(to + i, x);
                else store_up_to(to + i, x, n);
                out = fma(x, load_up_to(q + i, n), out);
            }
            a.out[t * a.heads + head] = sum(out);
            from = to;
        }
    }
    if (stream) finish_stores_past_caches();
}

constexpr int64_t COLUMNS = 4 * LANES;   // of a piece: 128 rows of it are 32 KB
constexpr int64_t HEADS = 64;            // of a single column, run by one task
constexpr int64_t STREAMED = 1 << 17;  // floats; smaller states may still be in the caches at the next step

// Calls f with the number of vectors of `count` columns, a constant of 1 to 8, and with `count`.
template <int N = 1, typename F> void with_vectors(int64_t count, F f) {
    if (count <= N * LANES || N == 8) f(std::integral_constant<int, N>{}, count);
    else with_vectors<(N < 8 ? N + 1 : 8)>(count, f);
}

}  // namespace

void vb::run_recurrence(const Recurrence &a, const StateRows &at, int threads) {
    const int64_t pieces = (a.width + COLUMNS - 1) / COLUMNS, size = a.heads * a.depth * a.width;
    if (at.starts[at.sequences] * size < (1 << 15)) threads = 1;
    const bool whole = (a.width == 1 ? a.depth : a.width) % LANES == 0 && (uintptr_t)a.state % 64 == 0;
    const bool stream = whole && at.writes * size >= STREAMED;
    if (a.width == 1) {
        const int64_t blocks = (a.heads + HEADS - 1) / HEADS;
        return parallel_for(at.sequences * blocks, threads, [&](int64_t n) {
            static thread_local std::vector<float> memory;
            memory.resize(a.depth);
            const int64_t first = n % blocks * HEADS, last = std::min(first + HEADS, a.heads);
            run_single(a, at, n / blocks, first, last, memory.data(), stream);
        });
    }
    parallel_for(at.sequences * a.heads * pieces, threads, [&](int64_t n) {
        static thread_local std::vector<float> memory;
        memory.resize(a.depth * COLUMNS);
        const int64_t s = n / (a.heads * pieces), head = n / pieces % a.heads;
        const int64_t first = n % pieces * COLUMNS;
        if (at.starts[s + 1] - at.starts[s] == 1 && is_written(at, s)) {  // two pieces at a time
            if (n % pieces % 2 == 0)
                with_vectors(std::min(2 * COLUMNS, a.width - first), [&](auto vectors, int64_t count) {
                    run_row<vectors>(a, at, s, head, first, count, stream);
                });
            return;
        }
        with_vectors(std::min(COLUMNS, a.width - first), [&](auto vectors, int64_t count) {
            run_columns<vectors>(a, at, s, head, first, count, memory.data());
        });
    });
}

namespace {

// Convolves channels `first` to `first + 16` of one sequence, of which `count` exist, with taps[width, 16].
template <typename T>
void convolve_channels(float *out, const T *x, const float *taps, f32x16 bias, T *state,
                       const StateRows &at, int64_t channels, int64_t width, int64_t s, int64_t first,
                       int64_t count) {
    const int64_t begin = at.starts[s], end = at.starts[s + 1], before = width - 1;
    int64_t write = first_write(at, s);
    // The input of row `t`. Those before the sequence's first row are in its state, [before, channels].
    auto input = [&](int64_t t) {
        return t < begin ? state + (at.sources[s] * before + before + t - begin) * channels + first
                         : x + t * channels + first;
    };
    for (int64_t t = begin; t < end; t++) {
        f32x16 total = bias;
        for (int64_t j = 0; j < width; j++) {
            const T *p = input(t - before + j);
            const f32x16 value = count >= LANES ? load(p) : load_first(p, (int)count);
            total = fma(value, load(taps + j * LANES), total);
        }
        store_up_to(out + t * channels + first, total, count);
        if (write < at.writes && at.rows[write] == t) {
            T *target = state + at.targets[write++] * before * channels + first;
            const int64_t n = std::min<int64_t>(count, LANES);
            for (int64_t j = 0; j < before; j++) {
                const T *p = input(t - before + 1 + j);
                std::copy(p, p + n, target + j * channels);
            }
        }
    }
}

}  // namespace

template <typename T>
void vb::convolve(float *out, const T *x, const void *weight, bool weight_f32, const T *bias, T *state,
                  const StateRows &at, int64_t channels, int64_t width, int threads) {
    const int64_t pieces = (channels + LANES - 1) / LANES;
    if (at.starts[at.sequences] * channels < (1 << 14)) threads = 1;
    parallel_for(pieces, threads, [&](int64_t n) {
        static thread_local std::vector<float> taps;
        taps.assign(width * LANES, 0.0f);
        const int64_t first = n * LANES, count = channels - first;
        const int lanes = (int)std::min<int64_t>(count, LANES);
        for (int64_t j = 0; j < width; j++)
            for (int i = 0; i < lanes; i++)
                taps[j * LANES + i] = value_at<T>(weight, weight_f32, (first + i) * width + j);
        const f32x16 added = bias ? load_first(bias + first, lanes) : splat(0.0f);
        for (int64_t s = 0; s < at.sequences; s++)
            convolve_channels(out, x, taps.data(), added, state, at, channels, width, s, first, count);
    });
}

// As `linear_recurrence` in verbatim/kv/recurrence.py, with the same names.
extern "C" void vb_linear_recurrence(float *out, const float *q, const float *k, const float *v,
                                     const float *decay, const float *beta, float *state,
                                     const int32_t *starts, const int32_t *sources,
                                     const int32_t *rows, const int32_t *targets, int64_t sequences,
                                     int64_t writes, int64_t heads, int64_t key_heads, int64_t depth,
                                     int64_t width, int decay_by_row, const float *rate,
                                     int threads) {
    const Recurrence a{out,   q,     k,         v,     decay, beta,
                       state, heads, key_heads, depth, width, decay_by_row != 0, rate};
    run_recurrence(a, {starts, sources, rows, targets, sequences, writes}, threads);
}

// As `weighted_mean` in verbatim/kv/recurrence.py. Exponents are at most 0, as the larger one is subtracted.
extern "C" void vb_weighted_mean(float *out, const float *key, const float *value, const float *first,
                                 const float *decay, float *state, const int32_t *starts,
                                 const int32_t *sources, const int32_t *rows, const int32_t *targets,
                                 int64_t sequences, int64_t writes, int64_t channels,
                                 int decay_by_row, int threads) {
    const StateRows at{starts, sources, rows, targets, sequences, writes};
    const int64_t pieces = (channels + LANES - 1) / LANES;
    if (starts[sequences] * channels < (1 << 13)) threads = 1;
    parallel_for(sequences * pieces, threads, [&](int64_t n) {
        const int64_t s = n / pieces, c = n % pieces * LANES, count = channels - c;
        int64_t write = first_write(at, s);
        const float *source = state + sources[s] * 3 * channels + c;
        f32x16 total = load_up_to(source, count), weights = load_up_to(source + channels, count);
        f32x16 largest = load_up_to(source + 2 * channels, count);
        largest = select(weights == 0.0f, splat(-1e38f), largest);  // before the first row
        const f32x16 bonus = load_up_to(first + c, count);
        for (int64_t t = starts[s]; t < starts[s + 1]; t++) {
            const f32x16 k = load_up_to(key + t * channels + c, count);
            const f32x16 v = load_up_to(value + t * channels + c, count);
            f32x16 top = max(largest, k + bonus), old = exp_nonpositive(largest - top);
            f32x16 now = exp_nonpositive(k + bonus - top);
            store_up_to(out + t * channels + c, fma(old, total, now * v) / fma(old, weights, now), count);
            largest -= load_up_to(decay + (decay_by_row ? t * channels : 0) + c, count);
            top = max(largest, k), old = exp_nonpositive(largest - top), now = exp_nonpositive(k - top);
            total = fma(old, total, now * v), weights = fma(old, weights, now), largest = top;
            if (write >= writes || rows[write] != t) continue;
            float *target = state + targets[write++] * 3 * channels + c;
            store_up_to(target, total, count), store_up_to(target + channels, weights, count);
            store_up_to(target + 2 * channels, largest, count);
        }
    });
}

// As `causal_conv` in verbatim/kv/recurrence.py.
#define EXPORT_CONV(name, T)                                                                       \
    extern "C" void name(float *out, const T *x, const void *weight, int weight_f32, const T *bias, \
                         T *state, const int32_t *starts, const int32_t *sources,                  \
                         const int32_t *rows, const int32_t *targets, int64_t sequences,           \
                         int64_t writes, int64_t channels, int64_t width, int threads) {           \
        convolve(out, x, weight, weight_f32 != 0, bias, state,                                     \
                 {starts, sources, rows, targets, sequences, writes}, channels, width, threads);   \
    }                                                                                              \
    template void vb::convolve(float *, const T *, const void *, bool, const T *, T *,             \
                               const StateRows &, int64_t, int64_t, int);
EXPORT_CONV(vb_causal_conv_f32, float)
EXPORT_CONV(vb_causal_conv_bf16, bf16)
