// Mixtures of experts (experts.h): a few matrix products cover all experts of a layer.
//
// Rows are sorted by expert, so that the weights of an expert are read once, and threads share experts and
// columns. A row's bits depend neither on its place among an expert's rows nor on the other experts.

#include "experts.h"

#include <algorithm>
#include <limits>
#include <vector>

using namespace vb;

namespace {

// ---- routing ----

// out = f(x), for sixteen values at a time; missing lanes are -infinity.
template <typename F> static inline void by_sixteen(float *out, const float *x, int64_t n, F f) {
    for (int64_t k = 0; k < n; k += 16) {
        const int count = (int)std::min<int64_t>(16, n - k);
        float values[16];
        std::fill(values, values + 16, -std::numeric_limits<float>::infinity());
        std::memcpy(values, x + k, count * sizeof(float));
        store_first(out + k, f(load(values)), count);
    }
}

static void softmax(float *out, const float *x, int64_t n) {
    const f32x16 most = splat(*std::max_element(x, x + n));
    f32x16 sums = {};
    by_sixteen(out, x, n, [&](f32x16 v) {
        const f32x16 e = exp_nonpositive(v - most);
        sums += e;
        return e;
    });
    const f32x16 total = splat(sum(sums));
    by_sixteen(out, out, n, [&](f32x16 v) { return v / total; });
}

static void to_scores(float *out, const float *logits, int64_t n, int32_t score) {
    if (score == SOFTMAX) softmax(out, logits, n);
    else if (score == SIGMOID) by_sixteen(out, logits, n, [](f32x16 v) { return vb::sigmoid(v); });
    else if (out != logits) std::memcpy(out, logits, n * sizeof(float));
}

// Writes the indices of the k largest of n values to `best`, largest first, ties by lowest index.
static void take_largest(const float *values, int64_t n, int k, int32_t *best) {
    std::vector<bool> taken(n);
    for (int j = 0; j < k; j++) {
        int64_t at = -1;
        for (int64_t i = 0; i < n; i++)
            if (!taken[i] && (at < 0 || values[i] > values[at])) at = i;
        taken[at] = true, best[j] = (int32_t)at;
    }
}

// Sets the scores of experts outside of the best groups to -infinity.
static void keep_best_groups(const Router &r, float *choice, int64_t n) {
    const int64_t size = n / r.groups;
    std::vector<float> scores(r.groups);
    for (int g = 0; g < r.groups; g++) {
        const float *at = choice + g * size;
        int32_t best[2];
        const int count = r.best_two && size > 1 ? 2 : 1;
        take_largest(at, size, count, best);
        scores[g] = at[best[0]] + (count == 2 ? at[best[1]] : 0.0f);
    }
    std::vector<int32_t> best(r.top_groups);
    take_largest(scores.data(), r.groups, r.top_groups, best.data());
    std::vector<bool> kept(r.groups);
    for (int32_t g : best) kept[g] = true;
    for (int64_t i = 0; i < n; i++)
        if (!kept[i / size]) choice[i] = -std::numeric_limits<float>::infinity();
}

template <typename T>
static void choose_row(const Router &r, float *logits, float *scores, float *choice,
                       const int16_t *forced, int32_t *experts, float *weights) {
    const int64_t n = r.weight.cols;
    const int k = r.top_k;
    if (r.softcap > 0.0f) {
        const f32x16 cap = splat(r.softcap);
        by_sixteen(logits, logits, n, [&](f32x16 v) { return vb::tanh(v / cap) * cap; });
    }
    const auto round = [](float &x) {
        T held;
        put(&held, x);
        x = to_float(held);
    };
    to_scores(scores, logits, n, r.score);
    if (r.rounded_scores) std::for_each(scores, scores + n, round);
    for (int64_t i = 0; i < n; i++) {
        float correction = 0.0f;
        if (r.correction)
            correction = r.correction_f32 ? ((const float *)r.correction)[i]
                                          : to_float(((const T *)r.correction)[i]);
        choice[i] = r.correction ? scores[i] + correction : scores[i];
    }
    if (r.groups > 1) keep_best_groups(r, choice, n);
    take_largest(choice, n, k, experts);
    for (int j = 0; j < k; j++)
        if (forced && forced[j] >= 0) experts[j] = forced[j];
    for (int j = 0; j < k; j++)
        weights[j] = (r.chosen_score == AS_IS ? scores : logits)[experts[j]];
    to_scores(weights, weights, k, r.chosen_score);
    if (r.normalized) {
        float total = weights[0];
        for (int j = 1; j < k; j++) total += weights[j];
        total += 1e-20f;  // as in DeepSeek's code; too small to change a sum of usual size
        for (int j = 0; j < k; j++) weights[j] /= total;
    }
    for (int j = 0; j < k; j++) {
        if (r.scale != 1.0f) weights[j] *= r.scale;
        if (r.rounded) round(weights[j]);
    }
}

template <typename From, typename To> static void copy_as(To *out, const From *x, int64_t n) {
    for (int64_t k = 0; k < n; k += 16) {
        const int count = (int)std::min<int64_t>(16, n - k);
        if (count == 16) store(out + k, load(x + k));
        else store_first(out + k, load_first(x + k, count), count);
    }
}

// ---- the experts ----

template <typename T>
static void glu_row(const Experts &e, T *row) {
    const int64_t inner = e.inner;
    if (e.glu == UNGATED) return activate_row<T>(row, row, nullptr, inner, e.activation);
    if (e.glu == SPLIT) return activate_row(row, row, row + inner, inner, e.activation);
    if (e.glu == SPLIT_WIDE) {
        const T *up = row + inner;
        const auto wide = [&](auto act) {
            each_lane(row, inner, [&](auto at) { return act(at(row)) * at(up); });
        };
        if (e.activation == SILU) return wide([](f32x16 x) { return silu(x); });
        return wide([](f32x16 x) { return gelu_tanh(x); });
    }
    const f32x16 limit = splat(e.limit), alpha = splat(e.alpha);
    if (e.glu == SOFTCAPPED) {
        const T *up = row + inner;
        each_lane(row, inner, [&](auto at) {
            const f32x16 gate = at(row);
            const f32x16 open = vb::tanh(gate / alpha) * alpha * vb::sigmoid(gate);
            return open * (vb::tanh(at(up) / limit) * limit);
        });
        return;
    }
    const int64_t step = e.glu == CLAMPED_PAIRS ? 2 : 1, up_at = e.glu == CLAMPED_PAIRS ? 1 : inner;
    for (int64_t k = 0; k < inner; k += 16) {
        const int count = (int)std::min<int64_t>(16, inner - k);
        float gates[16] = {}, ups[16] = {};
        for (int i = 0; i < count; i++) {
            gates[i] = to_float(row[step * (k + i)]);
            ups[i] = to_float(row[step * (k + i) + up_at]);
        }
        f32x16 gate = load(gates), up = load(ups);
        gate = select(gate > limit, limit, gate);
        up = select(up > limit, limit, select(up < -limit, -limit, up));
        if (e.glu == CLAMPED_SPLIT) {
            store_first(row + k, rounded<T>(silu(gate)) * up, count);
            continue;
        }
        const f32x16 open = rounded<T>(sigmoid(rounded<T>(gate * alpha)));
        const f32x16 glu = rounded<T>(gate * open);
        store_first(row + k, rounded<T>(up + 1.0f) * glu, count);
    }
}

// The slots of rows (one for each expert of a row), sorted by expert.
struct Sorted {
    std::vector<int64_t> starts;  // the first sorted slot of each expert, and the number of slots
    std::vector<int64_t> place;   // the sorted position of each slot; -1: its expert has no weights

    Sorted(const int32_t *experts, int64_t slots, int64_t count)
        : starts(count + 1), place(slots, -1) {
        for (int64_t s = 0; s < slots; s++)
            if (experts[s] < count) starts[experts[s] + 1]++;
        for (int64_t i = 0; i < count; i++) starts[i + 1] += starts[i];
        std::vector<int64_t> next = starts;
        for (int64_t s = 0; s < slots; s++)
            if (experts[s] < count) place[s] = next[experts[s]]++;
    }

    // Copies each row of x[rows, width] to the sorted positions of its slots, to[slots, width].
    template <typename T>
    void gather(const T *x, int64_t rows, int64_t top_k, int64_t width, T *to, int threads) const {
        each_row(rows, top_k * width, threads, [&](int64_t r) {
            for (int64_t s = r * top_k; s < (r + 1) * top_k; s++)
                if (place[s] >= 0)
                    std::memcpy(to + place[s] * width, x + r * width, width * sizeof(T));
        });
    }
};

}  // namespace

template <typename T>
void vb::choose(const Router &router, float *logits, int64_t rows, const Record &record,
                Chosen chosen, int threads) {
    const int64_t n = router.weight.cols, k = router.top_k;
    each_row(rows, 16 * n, threads, [&](int64_t r) {
        const Scratch<float> scores(n), choice(n);
        int32_t *experts = chosen.experts + r * k;
        choose_row<T>(router, logits + r * n, scores.data, choice.data,
                      record.forced ? record.forced + r * record.stride : nullptr, experts,
                      chosen.weights + r * k);
        if (!record.chosen) return;
        int16_t *to = record.chosen + r * record.stride;
        for (int64_t j = 0; j < k; j++) to[j] = (int16_t)experts[j];
    });
}

template <typename T>
void vb::route(const Router &router, const T *x, int64_t rows, const Record &record, Chosen chosen,
               int threads) {
    const int64_t n = router.weight.cols, depth = router.weight.depth;
    const Scratch<float> logits(rows * n);
    if (router.wide && sizeof(T) == 2) {
        const Scratch<float> wide(rows * depth);
        const bool widen = router.weight.format == BF16;
        const Scratch<float> weight(widen ? n * depth : 0);
        Matrix m = router.weight;
        each_row(rows, depth, threads, [&](int64_t r) {
            copy_as(wide.data + r * depth, x + r * depth, depth);
        });
        if (widen) {
            each_row(n, depth, threads, [&](int64_t r) {
                copy_as(weight.data + r * depth, (const bf16 *)m.data + r * depth, depth);
            });
            m.data = weight.data, m.format = FLOAT;
        }
        multiply(wide.data, rows, depth, &m, 1, logits.data, n, threads);
    } else {
        const Scratch<T> own(rows * n);
        multiply(x, rows, depth, &router.weight, 1, own.data, n, threads);
        copy_as(logits.data, own.data, rows * n);
    }
    choose<T>(router, logits.data, rows, record, chosen, threads);
}

template <typename T>
void vb::run_sorted(const Experts &e, const T *x, const int64_t *starts, T *out, int threads) {
    std::vector<Matrix> inputs, downs;
    std::vector<RowGroup> groups;
    inputs.reserve(e.count * e.num_inputs), downs.reserve(e.count);
    for (int64_t i = 0; i < e.count; i++) {
        if (starts[i] == starts[i + 1]) continue;
        groups.push_back({starts[i], starts[i + 1], inputs.data() + inputs.size()});
        for (int j = 0; j < e.num_inputs; j++) inputs.push_back(e.inputs[j][i]);
        downs.push_back(e.down[i]);
    }
    if (groups.empty()) return;
    const int64_t rows = starts[e.count], width = e.glu == UNGATED ? e.inner : 2 * e.inner;
    const int64_t count = (int64_t)groups.size();
    const Scratch<T> gates(rows * width);
    multiply_groups(x, e.hidden, groups.data(), count, e.num_inputs, gates.data, width, threads);
    each_row(rows, width, threads, [&](int64_t r) { glu_row(e, gates.data + r * width); });
    for (int64_t i = 0; i < count; i++) groups[i].matrices = &downs[i];
    multiply_groups(gates.data, width, groups.data(), count, 1, out, e.hidden, threads);
    if (e.norm.kind == NONE) return;
    each_row(rows, e.hidden, threads, [&](int64_t r) {
        norm_row(out + r * e.hidden, out + r * e.hidden, e.norm);
    });
}

template <typename T>
void vb::run_experts(const Experts &e, const T *x, int64_t rows, Chosen chosen, int64_t top_k,
                     T *out, int threads) {
    const int64_t hidden = e.hidden;
    const Sorted slots(chosen.experts, rows * top_k, e.count);
    const Scratch<T> sorted(slots.starts.back() * hidden), made(slots.starts.back() * hidden);
    slots.gather(x, rows, top_k, hidden, sorted.data, threads);
    run_sorted(e, sorted.data, slots.starts.data(), made.data, threads);
    each_row(rows, top_k * hidden, threads, [&](int64_t r) {
        const Scratch<const T *> of(top_k);
        const float *weights = chosen.weights + r * top_k;
        for (int64_t j = 0; j < top_k; j++) {
            const int64_t at = slots.place[r * top_k + j];
            of.data[j] = at < 0 ? x + r * hidden : made.data + at * hidden;
        }
        each_lane(out + r * hidden, hidden, [&](auto at) {
            f32x16 total = at(of.data[0]) * weights[0];
            for (int64_t j = 1; j < top_k; j++) total += at(of.data[j]) * weights[j];
            return total;
        });
    });
}

template <typename T>
void vb::run_mlp(const Matrix *gates, int num_gates, const Matrix &down, int32_t activation,
                 const T *x, int64_t rows, const Adapted &adapted, T *out, int threads) {
    const int64_t inner = down.depth;
    int64_t width = 0;
    for (int i = 0; i < num_gates; i++) width += gates[i].cols;
    const Scratch<T> made(rows * width);
    multiply_adapted(x, rows, gates->depth, gates, num_gates, adapted, made.data, width, threads);
    each_row(rows, width, threads, [&](int64_t r) {
        T *gate = made.data + r * width;
        activate_row(gate, gate, width > inner ? gate + inner : nullptr, inner, activation);
    });
    multiply_adapted(made.data, rows, width, &down, 1, adapted.at(2), out, down.cols, threads);
}

template <typename T>
void vb::run_mixture(const Mixture &m, const T *x, int64_t rows, Chosen chosen, T *out,
                     int threads) {
    const int64_t hidden = m.experts.hidden;
    run_experts(m.experts, x, rows, chosen, m.router.top_k, out, threads);
    if (m.scale != 1.0f)
        each_row(rows, hidden, threads, [&](int64_t r) {
            T *row = out + r * hidden;
            each_lane(row, hidden, [&](auto at) { return at(row) * m.scale; });
        });
    if (!m.num_shared) return;
    const Scratch<T> shared(rows * hidden), open(rows);
    run_mlp(m.shared_gates, m.num_shared, m.shared_down, m.experts.activation, x, rows, Adapted{},
            shared.data, threads);
    const bool gated = m.shared_gate.data;
    if (gated) multiply(x, rows, hidden, &m.shared_gate, 1, open.data, 1, threads);
    each_row(rows, hidden, threads, [&](int64_t r) {
        const T *own = shared.data + r * hidden;
        T *row = out + r * hidden;
        const f32x16 by = gated ? rounded<T>(sigmoid(splat(to_float(open.data[r])))) : splat(1.0f);
        each_lane(row, hidden, [&](auto at) { return at(row) + rounded<T>(by * at(own)); });
    });
}

// out[rows, top_k, cols] of x[rows, depth]: each row's products with the matrices that it chose, of `count`.
template <typename T>
static void multiply_chosen(const Stack &stack, int64_t count, const T *x, int64_t rows,
                            const int32_t *chosen, int64_t top_k, T *out, int threads) {
    const int64_t depth = stack.first.depth, cols = stack.first.cols;
    const Sorted slots(chosen, rows * top_k, count);
    const Scratch<T> sorted(rows * top_k * depth), outputs(rows * top_k * cols);
    slots.gather(x, rows, top_k, depth, sorted.data, threads);
    std::vector<Matrix> matrices(count);
    std::vector<RowGroup> groups;
    for (int64_t i = 0; i < count; i++) {
        if (slots.starts[i] == slots.starts[i + 1]) continue;
        matrices[i] = stack[i];
        groups.push_back({slots.starts[i], slots.starts[i + 1], &matrices[i]});
    }
    multiply_groups(sorted.data, depth, groups.data(), (int64_t)groups.size(), 1, outputs.data,
                    cols, threads);
    each_row(rows * top_k, cols, threads, [&](int64_t s) {
        std::memcpy(out + s * cols, outputs.data + slots.place[s] * cols, cols * sizeof(T));
    });
}

#define INSTANCES(T)                                                                               \
    template void vb::choose<T>(const Router &, float *, int64_t, const Record &, Chosen, int);    \
    template void vb::route(const Router &, const T *, int64_t, const Record &, Chosen, int);      \
    template void vb::run_sorted(const Experts &, const T *, const int64_t *, T *, int);           \
    template void vb::run_experts(const Experts &, const T *, int64_t, Chosen, int64_t, T *, int); \
    template void vb::run_mlp(const Matrix *, int, const Matrix &, int32_t, const T *, int64_t,    \
                              const Adapted &, T *, int);                                          \
    template void vb::run_mixture(const Mixture &, const T *, int64_t, Chosen, T *, int);
INSTANCES(float)
INSTANCES(bf16)

// C interface of the functions above. `threads` 0 takes OpenMP's number.
#define EXPORTS(suffix, T)                                                                         \
    extern "C" void vb_choose_##suffix(const Router *router, float *logits, int64_t rows,          \
                                       int16_t *record, const int16_t *forced, int64_t stride,     \
                                       int32_t *experts, float *weights, int threads) {            \
        choose<T>(*router, logits, rows, {record, forced, stride}, {experts, weights}, threads);   \
    }                                                                                              \
    extern "C" void vb_experts_sorted_##suffix(const Experts *experts, const T *x,                 \
                                               const int64_t *starts, T *out, int threads) {       \
        run_sorted(*experts, x, starts, out, threads);                                             \
    }                                                                                              \
    extern "C" void vb_experts_##suffix(const Experts *experts, const T *x, int64_t rows,          \
                                        int32_t *chosen, float *weights, int64_t top_k, T *out,    \
                                        int threads) {                                             \
        run_experts(*experts, x, rows, {chosen, weights}, top_k, out, threads);                    \
    }                                                                                              \
    extern "C" void vb_multiply_chosen_##suffix(const Stack *stack, int64_t count, const T *x,     \
                                                int64_t rows, const int32_t *chosen,               \
                                                int64_t top_k, T *out, int threads) {              \
        multiply_chosen(*stack, count, x, rows, chosen, top_k, out, threads);                      \
    }                                                                                              \
    extern "C" void vb_glu_##suffix(const Experts *experts, T *x, int64_t rows, int threads) {     \
        const int64_t width = experts->glu == UNGATED ? experts->inner : 2 * experts->inner;       \
        each_row(rows, width, threads, [&](int64_t r) { glu_row(*experts, x + r * width); });      \
    }
EXPORTS(f32, float)
EXPORTS(bf16, bf16)

// Sizes of the structs, to check declarations in other languages.
extern "C" int64_t vb_router_size() { return sizeof(Router); }
extern "C" int64_t vb_experts_size() { return sizeof(Experts); }
