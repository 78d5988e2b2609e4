// Rows of logits to token ids and log-probs; `verbatim/sampling/sampler.py` has the plain reference.
//
// One thread computes a whole row, so a row's result can't depend on other rows.

#include "philox.h"
#include "sampling.h"
#include "select.h"
#include "threads.h"

namespace vb::sampling {

static bool ahead(float score, int64_t id, float best, int64_t best_id) {
    return score > best || (score == best && id < best_id);
}

// argmax(y + noise) over a whole row; `top` is the id of the largest logit.
//
// A token with a logit d below the best score so far needs a noise of d or more to win, hence bits < 2^32 *
// exp(-d). That is tested on the bits with a margin for every rounding on the way, so only tokens that can't
// win are ruled out, and the few others get the exact formula.
template <typename View> static int64_t draw(const View &view, const Noise &noise, int64_t top) {
    int64_t best_id = top;
    float best = view.one(top) + gumbel(noise.bits((uint32_t)top));
    f32x16 limit = splat(32.01f + (std::fabs(best) + 32) * 0x1p-20f);
    for (int64_t i = 0; i < view.n; i += 32) {
        u32x16 bits[2];
        noise.bits32((uint32_t)i, bits);
        for (int half = 0; half < 2 && i + 16 * half < view.n; half++) {
            int64_t first = i + 16 * half;
            f32x16 lead = (view.near(first) - splat(best)) * splat(1.442695f);
            f32x16 need = log2_below(bits[half]) - lead;
            uint32_t mask = at_least(need, limit) ^ 0xffff;  // keeps NaN, the value of 0 * (1 / tiny)
            for (; mask; mask &= mask - 1) {
                int j = __builtin_ctz(mask);
                if (first + j >= view.n) break;
                float y = view.one(first + j);
                if (y == -INF) continue;
                float score = y + gumbel(bits[half][j]);
                if (ahead(score, first + j, best, best_id)) {
                    best = score;
                    best_id = first + j;
                    limit = splat(32.01f + (std::fabs(best) + 32) * 0x1p-20f);
                }
            }
        }
    }
    return best_id;
}

// The same draw over the tokens that survived the filters.
static int64_t draw(const List &list, const Noise &noise, int64_t vocab, Workspace &w) {
    if (list.n > 1024) {  // one Philox call per four ids is cheaper than one per listed id
        float *dense = w.spare_y.get();
        std::fill(dense, dense + vocab, -INF);
        for (int64_t i = 0; i < list.n; i++) dense[list.id[i]] = list.y[i];
        int64_t top = std::max_element(list.y, list.y + list.n) - list.y;
        return draw(Plain<float>{dense, vocab}, noise, list.id[top]);
    }
    int64_t best_id = -1;
    float best = -INF;
    for (int64_t i = 0; i < list.n; i++) {
        if (list.y[i] + 23.0f < best) continue;  // the noise is at most 22.88
        float score = list.y[i] + gumbel(noise.bits((uint32_t)list.id[i]));
        if (best_id < 0 || ahead(score, list.id[i], best, best_id)) {
            best = score;
            best_id = list.id[i];
        }
    }
    return best_id;
}

// Collects the tokens that survive the filters in `list`; returns false if there is no filter. `mass` is the
// row's total mass if it is known, or 0.
template <typename View>
static bool filter(const View &view, float max, double mass, const SampleRow &row, List &list,
                   Workspace &w) {
    bool by_k = row.top_k > 0 && row.top_k < view.n, by_p = row.top_p < 1;
    if (!by_k && !by_p && !(row.min_p > 0)) return false;
    if (!mass && !by_k && by_p) mass = total_mass(view, max);
    // Without top-k, first drop what can't survive: tokens that together weigh less than half of
    // what top-p leaves out, or that miss min-p by far.
    double slack = 1e-3 + std::fabs(max) * 1e-6, least = max - slack;
    if (by_k) {
        top_k(view, row.top_k, list, w);
        mass = by_p ? total_mass(list.view(), max) : 0;
    } else {
        least += by_p ? std::log(0.5 * (1 - row.top_p) * mass / view.n) : std::log(row.min_p);
        collect(view, (float)least, list);
    }
    if (by_p) top_p(list, max, row.top_p * mass, w);
    if (row.min_p > 0) min_p(list, max, row.min_p);
    return true;
}

// Applies the filters and draws, from logits that are already divided by the temperature.
template <typename View>
static void sample(const View &view, float max, double mass, SampleRow &row, Workspace &w) {
    Noise noise(row.seed, row.sample_index, row.position);
    List list{w.y.get(), w.id.get()};
    if (filter(view, max, mass, row, list, w)) {
        mass = total_mass(list.view(), max);
        row.id = (int32_t)draw(list, noise, view.n, w);
    } else {
        if (!mass) mass = total_mass(view, max);
        row.id = (int32_t)draw(view, noise, first_of(view, max));
    }
    row.sampled_logprob = (float)((double)view.one(row.id) - max - std::log(mass));
}

template <typename T>
static void likeliest(Plain<T> raw, float max, double log_mass, SampleRow &row, int32_t *ids,
                      float *logprobs, Workspace &w) {
    List list{w.y.get(), w.id.get()};
    top_k(raw, row.num_top, list, w);
    int32_t *order = w.spare_id.get();
    for (int64_t i = 0; i < list.n; i++) order[i] = (int32_t)i;
    row.found_top = (int32_t)std::min<int64_t>(row.num_top, list.n);
    std::partial_sort(order, order + row.found_top, order + list.n, [&](int32_t a, int32_t b) {
        return list.y[a] != list.y[b] ? list.y[a] > list.y[b] : a < b;
    });
    for (int i = 0; i < row.found_top; i++) {
        ids[i] = list.id[order[i]];
        logprobs[i] = (float)((double)list.y[order[i]] - max - log_mass);
    }
}

// Draws from a row with a known raw mass; `logits` are the edited ones, if any.
template <typename T>
static void draw_row(Plain<T> logits, float max, double raw_mass, SampleRow &row, Workspace &w) {
    float top = max / row.temperature;
    if (!std::isfinite(top)) {  // temperature 0, or so low that the quotients overflow
        row.id = (int32_t)first_of(logits, max);
        row.sampled_logprob = 0;
    } else if (row.temperature == 1) {
        sample(logits, max, raw_mass, row, w);
    } else {
        sample(Divided<T>(logits, row.temperature), top, 0, row, w);
    }
}

template <typename T>
static void one_row(Plain<T> raw, SampleRow &row, int32_t *top_ids, float *top_logprobs,
                    Workspace &w) {
    row.id = -1;
    row.found_top = 0;
    row.logprob = row.sampled_logprob = std::numeric_limits<float>::quiet_NaN();
    float max = largest(raw);
    if (!std::isfinite(max)) return;
    double mass = total_mass(raw, max), log_mass = std::log(mass);
    if (row.target >= 0) {
        row.id = (int32_t)row.target;
    } else if (row.edited) {
        Plain<float> edited{row.edited, raw.n};
        float edited_max = largest(edited);
        if (!std::isfinite(edited_max)) return;
        draw_row(edited, edited_max, 0, row, w);
    } else {
        draw_row(raw, max, mass, row, w);
    }
    row.logprob = (float)((double)raw.one(row.id) - max - log_mass);
    if (row.num_top > 0) likeliest(raw, max, log_mass, row, top_ids, top_logprobs, w);
}

template <typename T>
static void all_rows(const T *logits, int64_t stride, int64_t num_rows, int64_t vocab,
                     SampleRow *rows, int32_t *top_ids, float *top_logprobs, int64_t top_stride,
                     int num_threads) {
    if (num_rows * vocab < (1 << 17)) num_threads = 1;  // not worth waking the others
#pragma omp parallel num_threads(threads_at_once(num_threads))
    {
        Workspace workspace(vocab);
#pragma omp for schedule(dynamic)
        for (int64_t r = 0; r < num_rows; r++)
            one_row(Plain<T>{logits + rows[r].logits_row * stride, vocab}, rows[r], top_ids + r * top_stride,
                    top_logprobs + r * top_stride, workspace);
    }
}

}  // namespace vb::sampling

extern "C" {

using namespace vb::sampling;

// `logits` are float32, or bfloat16 if `is_bf16`; `stride` counts elements between rows. Results go to
// `rows`, and the likeliest ids with their log-probs to arrays [num_rows, top_stride].
void vb_sample_rows(const void *logits, int is_bf16, int64_t stride, int64_t num_rows,
                    int64_t vocab, SampleRow *rows, int32_t *top_ids, float *top_logprobs,
                    int64_t top_stride, int num_threads) {
    if (is_bf16)
        all_rows((const vb::bf16 *)logits, stride, num_rows, vocab, rows, top_ids, top_logprobs,
                 top_stride, num_threads);
    else
        all_rows((const float *)logits, stride, num_rows, vocab, rows, top_ids, top_logprobs,
                 top_stride, num_threads);
}

// Writes the ids that survive a row's filters, and the logarithm of their share of the mass. `logits` are
// already divided by the temperature. Returns the number of ids, or -1 if there is no filter.
int64_t vb_support(const float *logits, int64_t vocab, const SampleRow *row, int32_t *ids,
                   double *log_mass) {
    Plain<float> view{logits, vocab};
    Workspace workspace(vocab);
    List list{workspace.y.get(), ids};
    float max = largest(view);
    double mass = total_mass(view, max);
    if (!filter(view, max, mass, *row, list, workspace)) return -1;
    *log_mass = std::log(total_mass(list.view(), max)) - std::log(mass);
    return list.n;
}

// Writes the noise of ids 0 to vocab - 1, as draws use it.
void vb_gumbel(uint64_t seed, uint32_t sample_index, uint32_t position, int64_t vocab, float *out) {
    Noise noise(seed, sample_index, position);
    for (int64_t i = 0; i < vocab; i += 32) {
        vb::u32x16 bits[2];
        noise.bits32((uint32_t)i, bits);
        for (int64_t j = 0; j < 32 && i + j < vocab; j++)
            out[i + j] = gumbel(bits[j / 16][j % 16]);
    }
}

}  // extern "C"
