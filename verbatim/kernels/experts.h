// Mixtures of experts: the routing of rows, and the outputs of routed and shared experts.
#pragma once

#include "elementwise.h"
#include "lora.h"
#include "matrix.h"

namespace vb {

// Functions that turn logits into scores.
enum Score : int32_t { AS_IS = 0, SOFTMAX = 1, SIGMOID = 2 };

struct Router {
    Matrix weight;           // [experts, hidden]
    const void *correction;  // [experts], added to the scores for the choice only; or null
    int32_t correction_f32;  // it is in float instead of the activations' type
    int32_t wide;            // the product is computed in float, from a weight of either type
    int32_t score;           // over all experts
    int32_t chosen_score;    // over the logits of the chosen experts; AS_IS: take their `score`
    int32_t normalized;      // the weights of a row are divided by their sum
    int32_t rounded;         // the weights are rounded to the activations' type
    int32_t rounded_scores;  // the scores are, too, before the correction is added
    int32_t groups, top_groups;  // groups of experts, and how many a row may use; 0 groups: no limit
    int32_t best_two;            // a group's score is the sum of its two best scores instead of its best
    int32_t top_k;
    float scale, softcap;  // factor of the weights; softcap of the logits, 0: none
};

// The experts chosen by each row, and their weights: [rows, top_k].
struct Chosen {
    int32_t *experts;
    float *weights;
};

// Recorded and forced experts: row r has top_k entries from r * stride on.
struct Record {
    int16_t *chosen;        // or null
    const int16_t *forced;  // -1 leaves the choice to the router; or null
    int64_t stride;
    Record layer(int64_t i, int64_t top_k) const {
        return {chosen ? chosen + i * top_k : nullptr, forced ? forced + i * top_k : nullptr, stride};
    }
};

// One matrix per expert.
struct Stack {
    Matrix first;
    int64_t data_step, bias_step;  // bytes from one matrix to the next
    Matrix operator[](int64_t i) const {
        Matrix m = first;
        m.data = (const char *)m.data + i * data_step;
        if (m.bias) m.bias = (const char *)m.bias + i * bias_step;
        return m;
    }
};

// Functions that turn the input products into the input of `down`.
enum Glu : int32_t {
    UNGATED = 0,        // act(up)
    SPLIT = 1,          // act(gate) * up, gates first
    SPLIT_WIDE = 2,     // the same, rounded once
    CLAMPED_PAIRS = 3,  // (up + 1) * gate * sigmoid(alpha * gate), clamped; gate and up alternate
    CLAMPED_HALVES = 4,  // the same, gates first
    CLAMPED_SPLIT = 5,   // silu(gate) * up, clamped, gates first
    SOFTCAPPED = 6,      // cap(gate, alpha) * sigmoid(gate) * cap(up, limit), rounded once, gates first
};

struct Experts {
    Stack inputs[2];  // gate and up; one for both; or up alone
    Stack down;
    Norm norm;      // of an expert's output, or NONE
    int64_t count;  // expert numbers from `count` on return their row unchanged
    int64_t hidden, inner;
    int32_t num_inputs, glu, activation;
    float alpha, limit;
};

struct Mixture {
    Router router;
    Experts experts;
    Matrix shared_gates[2], shared_down;  // of the shared expert, used by every row
    Matrix shared_gate;                   // [1, hidden]: a sigmoid gate for its output; or no data
    int32_t num_shared;                   // number of shared_gates; 0: no shared expert
    float scale;                          // factor of the routed experts' sum
};

// T is float or bf16. Rows are contiguous; `threads` 0 takes OpenMP's number.

// Chooses the experts of each row of logits [rows, experts], which are overwritten.
template <typename T>
void choose(const Router &router, float *logits, int64_t rows, const Record &record, Chosen chosen,
            int threads);

// Chooses experts by the router's logits of x[rows, hidden].
template <typename T>
void route(const Router &router, const T *x, int64_t rows, const Record &record, Chosen chosen,
           int threads);

// out[n, hidden] of x[n, hidden], sorted by expert: rows starts[e] to starts[e + 1] go to expert e.
template <typename T>
void run_sorted(const Experts &experts, const T *x, const int64_t *starts, T *out, int threads);

// out[rows, hidden]: the weighted sum of a row's experts' outputs, in the order of its choice, in float.
template <typename T>
void run_experts(const Experts &experts, const T *x, int64_t rows, Chosen chosen, int64_t top_k,
                 T *out, int threads);

// The adapters of the rows, with a layer's matrices from `first` on; by default none.
struct Adapted {
    const AdaptedRows *groups = nullptr;
    int64_t num_groups = 0, first = 0;
    Adapted at(int64_t place) const { return {groups, num_groups, first + place}; }
};

// `multiply`, plus the rows' adapters.
template <typename T>
void multiply_adapted(const T *x, int64_t rows, int64_t x_stride, const Matrix *matrices, int count,
                      const Adapted &adapted, T *out, int64_t out_stride, int threads) {
    multiply(x, rows, x_stride, matrices, count, out, out_stride, threads);
    if (adapted.num_groups)
        add_low_rank(x, x_stride, adapted.groups, adapted.num_groups, adapted.first, matrices, count,
                     out, out_stride, threads);
}

// The output out[rows, down.cols] of an MLP: down(act(gate) * up). `gates` is gate and up, one matrix for
// both, or gate without up. Adapters have matrices for two gates and for down.
template <typename T>
void run_mlp(const Matrix *gates, int num_gates, const Matrix &down, int32_t activation, const T *x,
             int64_t rows, const Adapted &adapted, T *out, int threads);

// out[rows, hidden]: the sum of the routed experts plus the shared expert.
template <typename T>
void run_mixture(const Mixture &mixture, const T *x, int64_t rows, Chosen chosen, T *out,
                 int threads);

}  // namespace vb
