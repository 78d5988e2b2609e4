// A decoder layer as two calls, for the parts before and after its attention; as one call, if K and V are
// stored unquantized in the layer's dtype; or all layers of a model and its head as one call.
//
// The products, norms and activations are those that the separate modules run, in the same order and with the
// same roundings, so the outputs are bit-identical.

#include <numeric>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "recurrence.h"
#include "sampling.h"

using namespace vb;

namespace {

// Where a row of the input products has the values of the first key head, and the distance to the next one's.
struct Slice {
    int64_t at, stride;
};

// The gated delta rule (Yang et al. 2024, arXiv:2412.06464), or Kimi delta attention (Kimi Team 2025,
// arXiv:2510.26692), in place of attention. The layer's kv_heads and head_dim are those of keys and queries;
// heads and value_dim are those of values. Latent matrices, if any, are multiplied with the last columns of
// the input products; their outputs precede the products in a row.
struct DeltaRule {
    Slice q, k, v, gate, beta, decay;
    const void *weight;           // of the convolution, [channels, taps]
    const void *a_log, *dt_bias;  // [heads], [heads, decays]
    Norm norm;                    // of a head's output, applied before its gate
    int64_t taps;
    int64_t decays;               // per head: 1, or one for each row of its state
    float eps, q_scale, k_scale;  // of the norms of queries and keys
    float beta_scale;
    float floor;                  // if not 0, log-decays are floor * sigmoid(..)
    int32_t rounds_decays;        // log-decays are rounded, and so is exp(a_log)
    int32_t weight_f32, a_log_f32, dt_bias_f32;
    int32_t sigmoid;              // the gate is a sigmoid instead of a SiLU, and the norm is not rounded
};

// Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) in place of attention; input products: gate, x, B, C and dt.
// The layer's kv_heads and head_dim are the groups of B and C and their width; heads and value_dim are those
// of x.
struct Mamba2 {
    const void *weight, *bias;        // of the convolution, [channels, taps], [channels] or null
    const void *a_log, *dt_bias, *d;  // [heads]
    const void *norm_weight;          // of the norm after the gate
    int64_t norm_width;               // elements that are normed together
    int64_t taps;
    float eps, dt_min, dt_max;
};

// A gated convolution in place of attention: C * convolution(B * x), of the input products B, C and x. The
// layer has one head; its value_dim is the number of channels.
struct ShortConv {
    const void *weight, *bias;  // [channels, taps], [channels] or null
    int64_t taps;
};

// Offsets of a layer's matrices in an adapter. Must match verbatim/model/lora.py.
enum Place : int64_t { INPUTS = 0, OUTPUT = 6, GATES = 7, PLACES = 10 };

// The MLP's input, and the order in which the residual is added.
enum Residual : int32_t {
    SEQUENTIAL = 0,  // h + MLP(h) with h = x + attention
    PARALLEL = 1,    // (x + attention) + MLP(x)
    JOINED = 2,      // (attention + MLP(x)) + x
    POST = 3,        // as SEQUENTIAL, with both norms after the sums
    ALONE = 4,       // x + attention, without an MLP
    PART = 5,        // attention, or without inputs the MLP, and no residual
};

// Must match verbatim/model/structs.py.
struct Layer {
    Matrix inputs[6];  // q, k and v; one for all three; or those of a delta rule
    Matrix output;     // the output projection
    Matrix gates[2];   // gate and up; or one for both
    Matrix down;
    Norm before_attention, of_queries, of_keys, of_values, after_attention, before_mlp, after_mlp;
    int64_t hidden, heads, kv_heads, head_dim, value_dim;
    int32_t num_inputs, num_gates;
    int32_t activation, rotation;
    float residual_scale;  // factor of what is added to the residual
    int32_t is_bf16;
    float scale, softcap;  // of attention
    int64_t window, chunk;
    const void *sinks;       // of attention, [heads], or null
    const Mixture *mixture;  // in place of gates and down, or null; without either the MLP runs elsewhere
    const DeltaRule *delta;  // in place of attention, or null
    const Mamba2 *mamba2;    // likewise
    const ShortConv *conv;
    const float *alibi;      // slopes of attention, [heads], or null
    Matrix latent[2];        // of queries, if any, and of keys and values; of_queries and of_keys norm their
                             // inputs. Or those of a delta rule
    Slice q, k, v, gate;     // slices of the input products, q in `chunks` of equal size; `chunks` 0: q, k
    int64_t chunks;          // and v are adjacent. These gates have the size of q.
    float clip;              // if not 0, q, k and v are clipped to [-clip, clip]
    float q_scale;           // factor of q, before its norm
    float latent_scale[2];   // factors of the latent matrices' inputs, after their norms
    int64_t gate_width;      // gates of the attention output, one per head or per element; or 0
    int32_t sinks_f32, residual;
    int32_t turned_first;    // queries and keys are rotated before their norms
    int32_t index;           // among the layers that adapters have matrices for
    int32_t angles;          // index of the model's `Angles` that it uses
    const void *factor;      // scalar factor of the layer's output, or null
    int64_t absorbed;        // if not 0, latent vectors are stored (verbatim/model/latent.py), and this is the
                             // number of elements of a query head that are multiplied with latent[1]

    bool has_mlp() const { return num_gates || mixture || residual >= ALONE; }
    int64_t q_width() const { return heads * head_dim; }
    int64_t k_width() const { return kv_heads * head_dim; }
    int64_t own_value() const {  // width of a head's output
        return absorbed ? latent[1].cols / heads - absorbed : value_dim;
    }
    int64_t qkv_width() const {
        return q_width() + k_width() + kv_heads * value_dim + gate_width;
    }
    int64_t products() const {  // width of a row of input products
        int64_t width = 0;
        for (int i = 0; i < num_inputs; i++) width += inputs[i].cols;
        return width;
    }
};

// The rows of one forward, and the locations of their K, V and states. Must match verbatim/model/flat.py.
struct Rows {
    const int64_t *slots;
    const int32_t *query_starts, *context_lens, *block_tables;
    const int32_t *state_sources, *state_rows, *state_targets;
    int64_t count, sequences, max_blocks, block_size, state_writes;
    const AdaptedRows *adapted;  // groups of adjacent rows in ascending order, each of one adapter
    int64_t num_adapted;

    StateRows states() const {
        return {query_starts, state_sources, state_rows, state_targets, sequences, state_writes};
    }
    Adapted of(const Layer &l) const { return {adapted, num_adapted, l.index * PLACES}; }
};

// The adapter groups of the rows `kept` (ascending), renumbered by their index in `kept`.
std::vector<AdaptedRows> kept_groups(const Rows &rows, const int64_t *kept, int64_t count) {
    std::vector<AdaptedRows> groups;
    const AdaptedRows *group = rows.adapted, *end = group + rows.num_adapted;
    for (int64_t i = 0; i < count; i++) {
        while (group != end && group->end <= kept[i]) group++;
        if (group == end) break;
        if (group->begin > kept[i]) continue;
        if (!groups.empty() && groups.back().end == i && groups.back().matrices == group->matrices)
            groups.back().end++;
        else groups.push_back({i, i + 1, group->matrices});
    }
    return groups;
}

// Must match verbatim/model/whole.py.
struct Model {
    const Layer *const *layers;  // including their MLPs
    int64_t count;
    Norm norm;    // after the last layer
    Matrix head;  // [vocabulary, hidden]
};

// The input of a draft model's layers: the embedding of a token, or a product of the embedding and a hidden
// state. Must match verbatim/model/whole.py.
struct Entry {
    const void *table;  // embeddings [?, hidden]
    int64_t hidden;
    Matrix project;  // [hidden, 2 * hidden], of both, each after its norm; or null
    Norm of_embedding, of_hidden;
    int32_t hidden_first, is_bf16;
};

// Cosines and sines [?, width], in the layer's dtype or in float, and the index of the one to use for each
// row of the forward; null: the row's own index. Must match verbatim/model/angles.py.
struct Angles {
    const void *cos, *sin;
    int64_t width;
    const int64_t *rows;
    int32_t is_f32;
};

// Norms each head if the norm has the width of a head, else all heads together.
template <typename T> void norm_heads(T *x, int64_t width, const Norm &norm) {
    if (norm.kind == NONE) return;
    for (int64_t at = 0; at < width; at += norm.width) norm_row(x + at, x + at, norm);
}

// out[rows, products] = input products of hidden, after the norm if any; rows of `out` are `stride` apart.
template <typename T>
void project(const Layer &l, const T *hidden, int64_t rows, const Adapted &adapted, T *out,
             int64_t stride, int threads) {
    const T *x = hidden;
    Scratch<T> normed(l.before_attention.kind == NONE ? 0 : rows * l.hidden);
    if (l.before_attention.kind != NONE) {
        each_row(rows, l.hidden, threads, [&](int64_t r) {
            norm_row(normed.data + r * l.hidden, hidden + r * l.hidden, l.before_attention);
        });
        x = normed.data;
    }
    multiply_adapted(x, rows, l.hidden, l.inputs, l.num_inputs, adapted.at(INPUTS), out, stride,
                     threads);
}

// out[rows, heads, cols] = x[rows, heads, depth] by the matrix of each head, a part of latent[1]. `first` is
// that of the first head. Strides are of rows and heads, in elements.
template <typename T>
void multiply_heads(const Layer &l, const Matrix &first, const T *x, int64_t rows, int64_t x_stride,
                    int64_t x_head, T *out, int64_t out_stride, int64_t out_head, int threads) {
    const int64_t numbers = l.heads * first.cols * first.depth, apart = l.latent[1].cols / l.heads;
    threads = threads_for(rows * numbers, numbers, threads);
    const int each = l.heads < threads ? threads : 1;  // threads for one head
    parallel_for(l.heads, each > 1 ? 1 : threads, [&](int64_t h) {
        Matrix matrix = first;
        matrix.data = (const T *)first.data + h * apart * l.latent[1].depth;
        multiply(x + h * x_head, rows, x_stride, &matrix, 1, out + h * out_head, out_stride, each);
    });
}

// attended[rows, heads, own_value] = latent[rows, heads, value_dim], the output of attention over latent
// vectors, by the matrices of values.
template <typename T>
void expand_values(const Layer &l, const T *latent, int64_t rows, T *attended, int threads) {
    Matrix values = l.latent[1];
    values.cols = l.own_value();
    values.data = (const T *)values.data + l.absorbed * values.depth;
    multiply_heads(l, values, latent, rows, l.heads * l.value_dim, l.value_dim, attended,
                   l.heads * values.cols, values.cols, threads);
}

void expand_values(const Layer &l, const void *latent, int64_t rows, void *attended, int threads) {
    if (l.is_bf16) expand_values(l, (const bf16 *)latent, rows, (bf16 *)attended, threads);
    else expand_values(l, (const float *)latent, rows, (float *)attended, threads);
}

// Latent attention (DeepSeek-AI 2024, arXiv:2405.04434): computes qkv[rows, qkv_width]. A row of input
// products has queries or their latent vector, the latent vector of keys and values, the rotated dimensions
// shared by all keys, and gates.
template <typename T, typename A>
void before_latent(const Layer &l, const T *hidden, int64_t rows, const Adapted &adapted,
                   const Angles &angles, T *qkv, int threads) {
    const Matrix &of_q = l.latent[0], &of_kv = l.latent[1];
    const int64_t width = l.products(), first = l.inputs[0].cols, rank = of_kv.depth, dim = l.head_dim;
    const int64_t turned = l.inputs[1].cols - rank, plain = dim - turned, all = l.qkv_width();
    const int64_t own_dim = l.absorbed ? l.absorbed + turned : dim;  // of queries before they are absorbed
    const Scratch<T> made(rows * width), q(of_q.data ? rows * of_q.cols : 0);
    const Scratch<T> kv(l.absorbed ? 0 : rows * of_kv.cols);
    project(l, hidden, rows, adapted, made.data, width, threads);
    each_row(rows, width, threads, [&](int64_t r) {
        const auto norm = [](T *x, const Norm &norm, float scale) {
            if (norm.kind != NONE) norm_row(x, x, norm);
            if (scale != 1.0f) each_lane(x, norm.width, [=](auto at) { return at(x) * scale; });
        };
        T *row = made.data + r * width;
        norm(row, l.of_queries, l.latent_scale[0]);
        norm(row + first, l.of_keys, l.latent_scale[1]);
        norm(row + first + rank, l.of_values, 1.0f);
    });
    if (of_q.data) multiply(made.data, rows, width, &of_q, 1, q.data, of_q.cols, threads);
    const T *queries = of_q.data ? q.data : made.data;
    const int64_t q_stride = of_q.data ? of_q.cols : width;
    if (l.absorbed) {
        Matrix keys = of_kv;
        keys.cols = rank, keys.depth = l.absorbed, keys.transposed = true;
        multiply_heads(l, keys, queries, rows, q_stride, own_dim, qkv, all, dim, threads);
    } else multiply(made.data + first, rows, width, &of_kv, 1, kv.data, of_kv.cols, threads);
    each_row(rows, all, threads, [&](int64_t r) {
        T *row = made.data + r * width, *key = row + first + rank, *to = qkv + r * all;
        const T *query = queries + r * q_stride;
        if (!l.absorbed) std::memcpy(to, query, l.q_width() * sizeof(T));
        else
            for (int64_t h = 0; h < l.heads; h++)
                std::memcpy(to + h * dim + plain, query + h * own_dim + l.absorbed, turned * sizeof(T));
        if (l.rotation != UNTURNED) {
            const int64_t at = (angles.rows ? angles.rows[r] : r) * angles.width;
            const A *cos = (const A *)angles.cos + at, *sin = (const A *)angles.sin + at;
            rotate_head(key, cos, sin, angles.width, l.rotation);
            for (int64_t h = 0; h < l.heads; h++)
                rotate_head(to + h * dim + plain, cos, sin, angles.width, l.rotation);
        }
        T *k = to + l.q_width(), *v = k + l.k_width(), *gates = v + l.kv_heads * l.value_dim;
        std::memcpy(gates, key + turned, l.gate_width * sizeof(T));
        if (l.absorbed) {
            std::memcpy(k, row + first, dim * sizeof(T));
            std::memcpy(v, k, dim * sizeof(T));
            return;
        }
        const T *from = kv.data + r * of_kv.cols;
        for (int64_t h = 0; h < l.heads; h++, k += dim, v += l.value_dim) {
            std::memcpy(k, from, plain * sizeof(T));
            std::memcpy(k + plain, key, turned * sizeof(T));
            std::memcpy(v, from + plain, l.value_dim * sizeof(T));
            from += plain + l.value_dim;
        }
    });
}

// Computes qkv[rows, qkv_width]: q, k, v, and gates if there are any.
template <typename T, typename A>
void before(const Layer &l, const T *hidden, int64_t rows, const Adapted &adapted,
            const Angles &angles, T *qkv, int threads) {
    const int64_t q_width = l.q_width(), k_width = l.k_width(), width = l.qkv_width();
    if (l.latent[1].data) return before_latent<T, A>(l, hidden, rows, adapted, angles, qkv, threads);
    if (l.chunks) {
        const int64_t all = l.products();
        const Scratch<T> made(rows * all);
        project(l, hidden, rows, adapted, made.data, all, threads);
        each_row(rows, width, threads, [&](int64_t r) {
            T *to = qkv + r * width;
            const auto take = [&](const Slice &from, int64_t count, int64_t size) {
                for (int64_t i = 0; i < count; i++, to += size)
                    std::memcpy(to, made.data + r * all + from.at + i * from.stride, size * sizeof(T));
            };
            take(l.q, l.chunks, q_width / l.chunks);
            take(l.k, l.kv_heads, l.head_dim);
            take(l.v, l.kv_heads, l.value_dim);
            if (l.gate_width) take(l.gate, l.chunks, q_width / l.chunks);
        });
    } else project(l, hidden, rows, adapted, qkv, width, threads);
    const bool turns = l.rotation != UNTURNED;
    const float top = l.clip, scale = l.q_scale;
    if (l.of_queries.kind == NONE && l.of_keys.kind == NONE && l.of_values.kind == NONE && !turns &&
        top == 0.0f && scale == 1.0f)
        return;
    each_row(rows, q_width + k_width, threads, [&](int64_t r) {
        T *row = qkv + r * width;
        if (scale != 1.0f) each_lane(row, q_width, [=](auto at) { return at(row) * scale; });
        if (top != 0.0f)
            each_lane(row, width, [=](auto at) {
                const f32x16 x = at(row);
                return select(x > top, splat(top), select(x < -top, splat(-top), x));
            });
        const auto turn = [&] {
            const int64_t at = (angles.rows ? angles.rows[r] : r) * angles.width;
            const A *cos = (const A *)angles.cos + at, *sin = (const A *)angles.sin + at;
            for (int64_t h = 0; h < l.heads + l.kv_heads; h++)
                rotate_head(row + h * l.head_dim, cos, sin, angles.width, l.rotation);
        };
        if (turns && l.turned_first) turn();
        norm_heads(row, q_width, l.of_queries);
        norm_heads(row + q_width, k_width, l.of_keys);
        norm_heads(row + q_width + k_width, l.kv_heads * l.value_dim, l.of_values);
        if (turns && !l.turned_first) turn();
    });
}

void before(const Layer &l, const void *hidden, int64_t rows, const Adapted &adapted,
            const Angles &angles, void *qkv, int threads) {
    if (!l.is_bf16)
        before<float, float>(l, (const float *)hidden, rows, adapted, angles, (float *)qkv, threads);
    else if (angles.is_f32)
        before<bf16, float>(l, (const bf16 *)hidden, rows, adapted, angles, (bf16 *)qkv, threads);
    else before<bf16, bf16>(l, (const bf16 *)hidden, rows, adapted, angles, (bf16 *)qkv, threads);
}

// attended *= sigmoid(gates), with the gates in the last columns of qkv.
template <typename T>
void apply_gates(const Layer &l, T *attended, const T *qkv, int64_t rows, int threads) {
    const int64_t width = l.qkv_width(), gated = l.heads * l.own_value(), each = gated / l.gate_width;
    each_row(rows, gated, threads, [&](int64_t r) {
        T *row = attended + r * gated;
        const T *gates = qkv + (r + 1) * width - l.gate_width;
        if (each == 1)
            each_lane(row, gated, [=](auto at) { return at(row) * rounded<T>(sigmoid(at(gates))); });
        else
            for (int64_t h = 0; h < l.heads; h++, row += each) {
                const f32x16 gate = rounded<T>(sigmoid(splat(to_float(gates[h]))));
                each_lane(row, each, [=](auto at) { return at(row) * gate; });
            }
    });
}

void apply_gates(const Layer &l, void *attended, const void *qkv, int64_t rows, int threads) {
    if (!l.gate_width) return;
    if (l.is_bf16) apply_gates(l, (bf16 *)attended, (const bf16 *)qkv, rows, threads);
    else apply_gates(l, (float *)attended, (const float *)qkv, rows, threads);
}

// Computes attended [rows, heads * value_dim] by the delta rule, as verbatim/model/recurrent_ops.py does. The
// states are those of the convolution and of the recurrence.
template <typename T>
void run_delta_rule(const Layer &l, const Rows &rows, T *conv_state, float *state, const T *hidden,
           T *attended, int threads) {
    const DeltaRule &d = *l.delta;
    const int64_t count = rows.count, depth = l.head_dim, value = l.value_dim, decays = d.decays;
    const int64_t k_width = l.k_width(), v_width = l.heads * value, group = l.heads / l.kv_heads;
    const int64_t channels = 2 * k_width + v_width, all_decays = l.heads * decays;
    const int64_t second = l.latent[0].cols + l.latent[1].cols, width = second + l.products();
    const Scratch<T> made(count * width), mixed(count * channels);
    project(l, hidden, count, rows.of(l), made.data + second, width, threads);
    int64_t from = width - l.latent[0].depth - l.latent[1].depth, to = 0;
    for (const Matrix &m : l.latent) {
        if (!m.data) continue;
        multiply(made.data + from, count, width, &m, 1, made.data + to, width, threads);
        from += m.depth, to += m.cols;
    }
    each_row(count, channels, threads, [&](int64_t r) {
        const T *row = made.data + r * width;
        T *to = mixed.data + r * channels;
        for (const auto &[slice, size] : {std::pair(d.q, depth), std::pair(d.k, depth),
                                         std::pair(d.v, group * value)})
            for (int64_t h = 0; h < l.kv_heads; h++, to += size)
                std::memcpy(to, row + slice.at + h * slice.stride, size * sizeof(T));
    });
    const Scratch<float> convolved(count * channels);
    convolve(convolved.data, mixed.data, d.weight, d.weight_f32, (const T *)nullptr, conv_state,
             rows.states(), channels, d.taps, threads);

    const Scratch<float> q(count * k_width), k(count * k_width), v(count * v_width);
    const Scratch<float> decay(count * all_decays), beta(count * l.heads), out(count * v_width);
    const Scratch<float> rates(l.heads), rate(all_decays), bias(all_decays);
    for (int64_t h = 0; h < l.heads; h++) rates.data[h] = value_at<T>(d.a_log, d.a_log_f32, h);
    each_lane(rates.data, l.heads, [&, x = rates.data](auto at) {
        const f32x16 rate = exponential(at(x));
        return d.rounds_decays && !d.a_log_f32 ? rounded<T>(rate) : rate;
    });
    for (int64_t i = 0; i < all_decays; i++) {
        rate.data[i] = rates.data[i / decays];
        bias.data[i] = value_at<T>(d.dt_bias, d.dt_bias_f32, i);
    }
    const Norm norm{nullptr, depth, d.eps, BARE};
    each_row(count, channels, threads, [&](int64_t r) {
        float *x = convolved.data + r * channels;
        each_lane(x, channels, [&, x](auto at) {
            return rounded<T>(silu(d.weight_f32 ? at(x) : rounded<T>(at(x))));
        });
        for (const auto &[to, scale] : {std::pair(q.data, d.q_scale), std::pair(k.data, d.k_scale)})
            for (int64_t h = 0; h < l.kv_heads; h++, x += depth) {
                float *head = to + r * k_width + h * depth;
                norm_row(head, x, norm);
                each_lane(head, depth, [head, by = scale](auto at) { return at(head) * by; });
            }
        std::memcpy(v.data + r * v_width, x, v_width * sizeof(float));
        const T *row = made.data + r * width;
        float *b = beta.data + r * l.heads, *a = decay.data + r * all_decays;
        for (int64_t h = 0; h < l.heads; h++) {
            b[h] = to_float(row[d.beta.at + h / group * d.beta.stride + h % group]);
            const T *given = row + d.decay.at + h / group * d.decay.stride + h % group * decays;
            for (int64_t i = 0; i < decays; i++) a[h * decays + i] = to_float(given[i]);
        }
        each_lane(b, l.heads, [=](auto at) { return rounded<T>(sigmoid(at(b))) * d.beta_scale; });
        each_lane(a, all_decays, [&, e = rate.data, bias = bias.data](auto at) {
            const f32x16 x = at(a) + at(bias);
            const f32x16 log = d.floor ? d.floor * sigmoid(at(e) * x) : -at(e) * softplus(x);
            return exponential(d.rounds_decays ? rounded<T>(log) : log);
        });
    });
    run_recurrence({out.data, q.data, k.data, v.data, decay.data, beta.data, state, l.heads,
                    l.kv_heads, depth, value, decays > 1},
                   rows.states(), threads);
    each_row(count, v_width, threads, [&](int64_t r) {
        for (int64_t h = 0; h < l.heads; h++) {
            float *x = out.data + r * v_width + h * value;
            T *head = attended + r * v_width + h * value;
            const T *gate = made.data + r * width + d.gate.at + h / group * d.gate.stride +
                            h % group * value;
            if (d.sigmoid) {
                const T *weight = (const T *)d.norm.weight;
                each_lane(x, value, [=](auto at) { return rounded<T>(at(x)); });
                norm_row(x, x, Norm{nullptr, value, d.norm.eps, BARE});
                each_lane(head, value,
                          [=](auto at) { return at(weight) * at(x) * sigmoid(at(gate)); });
                continue;
            }
            each_lane(head, value, [=](auto at) { return at(x); });
            norm_row(head, head, d.norm);
            each_lane(head, value, [=](auto at) { return at(head) * silu(at(gate)); });
        }
    });
}

// Computes attended [rows, heads * value_dim] by Mamba-2, as verbatim/model/recurrent_ops.py does.
template <typename T>
void run_mamba2(const Layer &l, const Rows &rows, T *conv_state, float *state, const T *hidden,
                T *attended, int threads) {
    const Mamba2 &m = *l.mamba2;
    const int64_t count = rows.count, width = l.products(), value = l.value_dim;
    const int64_t k_width = l.k_width(), v_width = l.heads * value;
    const int64_t channels = v_width + 2 * k_width;
    const Scratch<T> made(count * width), mixed(count * channels);
    project(l, hidden, count, rows.of(l), made.data, width, threads);
    each_row(count, channels, threads, [&](int64_t r) {
        std::memcpy(mixed.data + r * channels, made.data + r * width + v_width, channels * sizeof(T));
    });
    const Scratch<float> convolved(count * channels);
    convolve(convolved.data, mixed.data, m.weight, false, (const T *)m.bias, conv_state,
             rows.states(), channels, m.taps, threads);

    const Scratch<float> q(count * k_width), k(count * k_width), v(count * v_width);
    const Scratch<float> decay(count * l.heads), out(count * v_width);
    each_row(count, channels, threads, [&](int64_t r) {
        float *x = convolved.data + r * channels;
        each_lane(x, channels, [=](auto at) { return rounded<T>(silu(rounded<T>(at(x)))); });
        std::memcpy(k.data + r * k_width, x + v_width, k_width * sizeof(float));
        std::memcpy(q.data + r * k_width, x + v_width + k_width, k_width * sizeof(float));
        float *step = decay.data + r * l.heads;
        const T *dt = made.data + r * width + v_width + channels, *bias = (const T *)m.dt_bias;
        each_lane(step, l.heads, [=](auto at) {
            const f32x16 s = softplus(at(dt) + at(bias));
            return select(s < m.dt_min, splat(m.dt_min), select(s > m.dt_max, splat(m.dt_max), s));
        });
        for (int64_t h = 0; h < l.heads; h++) {
            const float *from = x + h * value;
            each_lane(v.data + r * v_width + h * value, value,
                      [=](auto at) { return at(from) * step[h]; });
        }
        const T *a_log = (const T *)m.a_log;
        each_lane(step, l.heads,
                  [=](auto at) { return exponential(at(step) * -exponential(at(a_log))); });
    });
    run_recurrence({out.data, q.data, k.data, v.data, decay.data, nullptr, state, l.heads,
                    l.kv_heads, l.head_dim, value, false},
                   rows.states(), threads);
    const Norm norm{nullptr, m.norm_width, m.eps, BARE};
    each_row(count, v_width, threads, [&](int64_t r) {
        float *y = out.data + r * v_width;
        const T *gate = made.data + r * width, *weight = (const T *)m.norm_weight;
        for (int64_t h = 0; h < l.heads; h++) {
            float *head = y + h * value;
            const float *x = convolved.data + r * channels + h * value;
            const float d = to_float(((const T *)m.d)[h]);
            each_lane(head, value, [=](auto at) { return rounded<T>(at(head) + at(x) * d); });
        }
        each_lane(y, v_width, [=](auto at) { return at(y) * silu(at(gate)); });
        norm_heads(y, v_width, norm);
        each_lane(attended + r * v_width, v_width,
                  [=](auto at) { return at(weight) * rounded<T>(at(y)); });
    });
}

// Computes attended [rows, value_dim] by the gated convolution.
template <typename T>
void run_short_conv(const Layer &l, const Rows &rows, T *state, const T *hidden, T *attended, int threads) {
    const int64_t count = rows.count, channels = l.value_dim, width = 3 * channels;
    const Scratch<T> made(count * width), mixed(count * channels);
    project(l, hidden, count, rows.of(l), made.data, width, threads);
    each_row(count, channels, threads, [&](int64_t r) {
        const T *b = made.data + r * width, *x = b + 2 * channels;
        each_lane(mixed.data + r * channels, channels, [=](auto at) { return at(b) * at(x); });
    });
    const Scratch<float> out(count * channels);
    convolve(out.data, mixed.data, l.conv->weight, false, (const T *)l.conv->bias, state,
             rows.states(), channels, l.conv->taps, threads);
    each_row(count, channels, threads, [&](int64_t r) {
        const T *c = made.data + r * width + channels;
        const float *y = out.data + r * channels;
        each_lane(attended + r * channels, channels,
                  [=](auto at) { return at(c) * rounded<T>(at(y)); });
    });
}

// Runs the operation that replaces attention; `first` and `second` are its states.
template <typename T>
void mix(const Layer &l, const Rows &rows, void *first, void *second, const T *hidden, T *attended,
         int threads) {
    if (l.conv) run_short_conv(l, rows, (T *)first, hidden, attended, threads);
    else if (l.mamba2) run_mamba2(l, rows, (T *)first, (float *)second, hidden, attended, threads);
    else run_delta_rule(l, rows, (T *)first, (float *)second, hidden, attended, threads);
}

// out = residual + x, with the norm applied to x, or with POST to the sum; after attention or the MLP.
template <typename T>
void add_back(const Layer &l, T *out, const T *residual, T *x, int64_t rows, const Norm &norm,
              int threads) {
    each_row(rows, l.hidden, threads, [&](int64_t r) {
        T *row = x + r * l.hidden, *to = out + r * l.hidden;
        if (norm.kind != NONE && l.residual != POST) norm_row(row, row, norm);
        add_row(to, residual + r * l.hidden, row, l.hidden, l.residual_scale);
        if (norm.kind != NONE && l.residual == POST) norm_row(to, to, norm);
    });
}

// Writes the residual after attention to `out` (with JOINED: `hidden`), and the attention output that was
// added to `made`. Returns the MLP's input: `normed`, or `out` if there is no norm.
template <typename T>
T *behind_attention(const Layer &l, const T *hidden, const T *attended, int64_t rows,
                    const Adapted &adapted, T *out, T *made, T *normed, int threads) {
    multiply_adapted(attended, rows, l.output.depth, &l.output, 1, adapted.at(OUTPUT), made, l.hidden,
                     threads);
    const auto norm = [&](const T *x) {
        each_row(rows, l.hidden, threads, [&](int64_t r) {
            norm_row(normed + r * l.hidden, x + r * l.hidden, l.before_mlp);
        });
    };
    const bool beside = l.residual == PARALLEL || l.residual == JOINED;
    if (beside) norm(hidden);  // before `hidden` is overwritten, as it may be `out`
    if (l.residual != JOINED) add_back(l, out, hidden, made, rows, l.after_attention, threads);
    else if (out != hidden) std::memcpy(out, hidden, rows * l.hidden * sizeof(T));
    if (l.before_mlp.kind == NONE) return out;
    if (!beside) norm(out);
    return normed;
}

// out += MLP(x), or with JOINED, out += attention + MLP(x).
template <typename T>
void add_mlp(const Layer &l, const T *x, int64_t rows, const Adapted &adapted, Chosen chosen, T *out,
             T *attention, int threads) {
    if (l.residual == ALONE) return;
    const Scratch<T> made(rows * l.hidden);
    if (l.mixture) run_mixture(*l.mixture, x, rows, chosen, made.data, threads);
    else
        run_mlp(l.gates, l.num_gates, l.down, l.activation, x, rows, adapted.at(GATES), made.data,
                threads);
    const bool joined = l.residual == JOINED;
    if (joined) add_back(l, attention, attention, made.data, rows, l.after_mlp, threads);
    add_back(l, out, out, joined ? attention : made.data, rows, joined ? Norm{} : l.after_mlp, threads);
    if (!l.factor) return;
    const float factor = to_float(*(const T *)l.factor);
    each_row(rows, l.hidden, threads, [&](int64_t r) {
        T *row = out + r * l.hidden;
        each_lane(row, l.hidden, [=](auto at) { return at(row) * factor; });
    });
}

// Buffers for the experts chosen by some rows of a layer; empty without a mixture.
struct Choice {
    int64_t top_k;
    Scratch<int32_t> experts;
    Scratch<float> weights;
    Choice(const Layer &l, int64_t rows)
        : top_k(l.mixture ? l.mixture->router.top_k : 0), experts(rows * top_k),
          weights(rows * top_k) {}
    Chosen chosen() const { return {experts.data, weights.data}; }
};

// out = the layer's output; or, if its MLP runs elsewhere, the residual after attention, and `normed` = the
// MLP's input.
template <typename T>
void after(const Layer &l, const T *hidden, const T *attended, int64_t rows, const Adapted &adapted,
           const Record &record, T *out, T *normed, int threads) {
    if (l.residual == PART && l.num_inputs)
        return multiply_adapted(attended, rows, l.output.depth, &l.output, 1, adapted.at(OUTPUT), out,
                                l.output.cols, threads);
    const Choice choice(l, rows);
    if (l.residual == PART) {
        if (!l.mixture)
            return run_mlp(l.gates, l.num_gates, l.down, l.activation, hidden, rows, adapted.at(GATES),
                           out, threads);
        route(l.mixture->router, hidden, rows, record, choice.chosen(), threads);
        return run_mixture(*l.mixture, hidden, rows, choice.chosen(), out, threads);
    }
    const Scratch<T> made(rows * l.hidden);
    if (!l.has_mlp()) {
        const T *x =
            behind_attention(l, hidden, attended, rows, adapted, out, made.data, normed, threads);
        if (x != normed) std::memcpy(normed, x, rows * l.hidden * sizeof(T));
        return;
    }
    const Scratch<T> room(rows * l.hidden);
    const T *x =
        behind_attention(l, hidden, attended, rows, adapted, out, made.data, room.data, threads);
    if (l.mixture) route(l.mixture->router, x, rows, record, choice.chosen(), threads);
    add_mlp(l, x, rows, adapted, choice.chosen(), out, made.data, threads);
}

void after(const Layer &l, const void *hidden, const void *attended, int64_t rows,
           const Adapted &adapted, const Record &record, void *out, void *normed, int threads) {
    if (l.is_bf16)
        after(l, (const bf16 *)hidden, (const bf16 *)attended, rows, adapted, record, (bf16 *)out,
              (bf16 *)normed, threads);
    else
        after(l, (const float *)hidden, (const float *)attended, rows, adapted, record, (float *)out,
              (float *)normed, threads);
}

// Writes the rows' K and V to the stores, and computes `attended` [rows, heads * own_value]. In a layer
// without attention, the stores hold its states.
void attend(const Layer &l, const Rows &rows, void *k_store, void *v_store, const void *hidden,
            const Angles &angles, char *attended, int threads) {
    if (l.delta || l.mamba2 || l.conv) {
        if (l.is_bf16)
            mix(l, rows, k_store, v_store, (const bf16 *)hidden, (bf16 *)attended, threads);
        else mix(l, rows, k_store, v_store, (const float *)hidden, (float *)attended, threads);
        return;
    }
    const int64_t q_width = l.q_width(), k_width = l.k_width(), width = l.qkv_width();
    const int64_t size = l.is_bf16 ? 2 : 4;
    Scratch<char> qkv(rows.count * width * size);
    before(l, hidden, rows.count, rows.of(l), angles, qkv.data, threads);
    const char *k = qkv.data + q_width * size, *v = k + k_width * size;
    vb_write_kv(k, v, (char *)k_store, (char *)v_store, rows.slots, rows.count, l.kv_heads,
                rows.block_size, l.head_dim * size, l.value_dim * size, width * size,
                l.head_dim * size, width * size, l.value_dim * size, threads);
    const Scratch<float> sinks(l.sinks ? l.heads : 0);
    for (int64_t h = 0; l.sinks && h < l.heads; h++)
        sinks.data[h] = value_at<bf16>(l.sinks, l.sinks_f32 || !l.is_bf16, h);
    const Scratch<char> vectors(l.absorbed ? rows.count * l.heads * l.value_dim * size : 0);
    char *out = l.absorbed ? vectors.data : attended;
    vb_attention(qkv.data, out, k_store, v_store, rows.query_starts, rows.context_lens,
                 rows.block_tables, rows.sequences, rows.max_blocks, width, l.head_dim, l.heads,
                 l.kv_heads, l.head_dim, l.value_dim, rows.block_size, l.window, l.chunk,
                 l.is_bf16, l.is_bf16, l.scale, l.softcap, l.sinks ? sinks.data : nullptr, 0, l.alibi,
                 nullptr, 0, threads);
    if (l.absorbed) expand_values(l, (const void *)out, rows.count, (void *)attended, threads);
    apply_gates(l, (void *)attended, (const void *)qkv.data, rows.count, threads);
}

// Bytes of a row of `attended`.
int64_t attended_bytes(const Layer &l) { return l.heads * l.own_value() * (l.is_bf16 ? 2 : 4); }

void whole(const Layer &l, const Rows &rows, void *k_store, void *v_store, const void *hidden,
           const Angles &angles, const Record &record, void *out, void *normed, int threads) {
    const Scratch<char> attended(rows.count * attended_bytes(l));
    if (l.num_inputs) attend(l, rows, k_store, v_store, hidden, angles, attended.data, threads);
    after(l, hidden, attended.data, rows.count, rows.of(l), record, out, normed, threads);
}

// to[i] = from[rows[i]], for rows of `bytes` each.
void take_rows(void *to, const void *from, const int64_t *rows, int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; i++)
        std::memcpy((char *)to + i * bytes, (const char *)from + rows[i] * bytes, bytes);
}

// The last layer, the final norm and the head. After attention only the rows that need logits are computed;
// for the others, in a layer with experts, only the routing is. With `kept_rows` [slots, hidden] all rows are
// computed, and their final hidden states, after the norm, are written there.
template <typename T>
void finish(const Model &m, const Rows &rows, void *k_store, void *v_store, const T *hidden,
            const Angles &angles, const Record &record, const int64_t *logit_rows, int64_t num_logits,
            T *normed, T *logits, T *kept_rows, int threads) {
    const Layer &l = *m.layers[m.count - 1];
    std::vector<int64_t> every(kept_rows ? rows.count : 0);
    std::iota(every.begin(), every.end(), 0);
    const int64_t *wanted = kept_rows ? every.data() : logit_rows;
    const int64_t count = kept_rows ? rows.count : num_logits;
    const int64_t width = m.norm.width, bytes = attended_bytes(l);
    const Scratch<char> attended(rows.count * bytes);
    attend(l, rows, k_store, v_store, hidden, angles, attended.data, threads);
    const Scratch<T> kept(count * width), x(count * width), made(count * width);
    const Choice choice(l, count);
    const std::vector<AdaptedRows> groups = kept_groups(rows, wanted, count);
    const Adapted adapted{groups.data(), (int64_t)groups.size(), l.index * PLACES};
    const T *given = x.data;
    if (!l.mixture) {
        const Scratch<char> theirs(count * bytes);
        take_rows(kept.data, hidden, wanted, count, width * sizeof(T));
        take_rows(theirs.data, attended.data, wanted, count, bytes);
        given = behind_attention(l, kept.data, (const T *)theirs.data, count, adapted, kept.data,
                                 made.data, x.data, threads);
    } else {
        const Scratch<T> residual(rows.count * width), room(rows.count * width);
        const Scratch<T> added(rows.count * width);
        const Choice all(l, rows.count);
        const T *of_all = behind_attention(l, hidden, (const T *)attended.data, rows.count,
                                           rows.of(l), residual.data, added.data, room.data, threads);
        route(l.mixture->router, of_all, rows.count, record, all.chosen(), threads);
        take_rows(kept.data, residual.data, wanted, count, width * sizeof(T));
        take_rows(x.data, of_all, wanted, count, width * sizeof(T));
        take_rows(made.data, added.data, wanted, count, width * sizeof(T));
        take_rows(choice.experts.data, all.experts.data, wanted, count, choice.top_k * 4);
        take_rows(choice.weights.data, all.weights.data, wanted, count, choice.top_k * 4);
    }
    add_mlp(l, given, count, adapted, choice.chosen(), kept.data, made.data, threads);
    each_row(count, width, threads, [&](int64_t r) {
        T *out = kept_rows ? kept_rows + rows.slots[r] * width : normed + r * width;
        norm_row(out, kept.data + r * width, m.norm);
    });
    for (int64_t i = 0; kept_rows && i < num_logits; i++)
        std::memcpy(normed + i * width, kept_rows + rows.slots[logit_rows[i]] * width, width * sizeof(T));
    multiply(normed, num_logits, width, &m.head, 1, logits, m.head.cols, threads);
}

// Runs all layers in place on `hidden`, and computes normed [count, hidden] and logits [count, vocabulary] of
// the rows `logit_rows`. Without a head, hidden becomes the output of the last layer.
void run_layers(const Model &m, const Rows &rows, void *const *stores, void *hidden, const Angles *angles,
                const Record &all, const int64_t *logit_rows, int64_t count, void *normed, void *logits,
                void *kept, int threads) {
    const int64_t last = m.head.data ? m.count - 1 : m.count;
    int64_t routed = 0;
    const auto record = [&](const Layer &l) {
        return l.mixture ? all.layer(routed++, l.mixture->router.top_k) : Record{};
    };
    for (int64_t i = 0; i < last; i++)
        whole(*m.layers[i], rows, stores[2 * i], stores[2 * i + 1], hidden, angles[m.layers[i]->angles],
              record(*m.layers[i]), hidden, nullptr, threads);
    if (last == m.count) return;
    void *k = stores[2 * last], *v = stores[2 * last + 1];
    const Record own = record(*m.layers[last]);
    const Angles &turns = angles[m.layers[last]->angles];
    if (m.layers[last]->is_bf16)
        finish(m, rows, k, v, (const bf16 *)hidden, turns, own, logit_rows, count, (bf16 *)normed,
               (bf16 *)logits, (bf16 *)kept, threads);
    else
        finish(m, rows, k, v, (const float *)hidden, turns, own, logit_rows, count, (float *)normed,
               (float *)logits, (float *)kept, threads);
}

template <typename T>
void enter(const Entry &e, const int64_t *ids, const T *entering, int64_t rows, T *out, int threads) {
    const int64_t width = e.hidden, hidden_at = e.hidden_first ? 0 : width;
    const T *table = (const T *)e.table;
    if (!e.project.data) {
        take_rows(out, table, ids, rows, width * sizeof(T));
        return;
    }
    const Scratch<T> both(rows * 2 * width);
    each_row(rows, 2 * width, threads, [&](int64_t r) {
        T *row = both.data + r * 2 * width;
        const T *embedded = table + ids[r] * width;
        norm_row(row + width - hidden_at, embedded, e.of_embedding);
        norm_row(row + hidden_at, entering ? entering + r * width : embedded, e.of_hidden);
    });
    multiply(both.data, rows, 2 * width, &e.project, 1, out, width, threads);
}

// See vb_chain.
template <typename T>
void chain(const Model &m, const Entry &e, Rows rows, void *const *stores, const int64_t *ids,
           const T *entering, std::vector<Angles> angles, const int64_t *logit_rows,
           const sampling::SampleRow *samples, const int32_t *lengths, int64_t most, int32_t *drawn,
           int threads) {
    const int64_t width = e.hidden, vocabulary = m.head.cols, blocks = rows.max_blocks;
    int64_t live = rows.sequences;
    std::vector<int64_t> who(live), next_ids(live), positions(live), slots(live), firsts(live);
    std::vector<int32_t> starts(live + 1), lens(rows.context_lens, rows.context_lens + live);
    std::vector<int32_t> next_lens(live), tables(rows.block_tables, rows.block_tables + live * blocks);
    std::vector<sampling::SampleRow> draws(live);
    const Scratch<T> normed(live * width), logits(live * vocabulary), next(live * width);
    for (int64_t i = 0; i < live; i++) who[i] = firsts[i] = i, starts[i + 1] = (int32_t)i + 1;
    for (int64_t step = 0; live; step++) {
        const Scratch<T> hidden(rows.count * width);
        enter(e, ids, entering, rows.count, hidden.data, threads);
        run_layers(m, rows, stores, hidden.data, angles.data(), Record{}, logit_rows, live, normed.data,
                   logits.data, nullptr, threads);
        for (int64_t i = 0; i < live; i++) {
            draws[i] = samples[who[i]];
            draws[i].logits_row = i;
            draws[i].position += (uint32_t)step;
        }
        vb_sample_rows(logits.data, sizeof(T) == sizeof(bf16), vocabulary, live, vocabulary, draws.data(),
                       nullptr, nullptr, 0, threads);
        int64_t left = 0;
        for (int64_t i = 0; i < live; i++) {
            const int64_t s = who[i], id = draws[i].id, position = lens[s]++;
            drawn[s * most + step] = (int32_t)id;
            const int64_t block = position / rows.block_size;
            if (step + 1 >= lengths[s] || id < 0 || block >= blocks) continue;
            const int32_t *table = rows.block_tables + i * blocks;
            slots[left] = table[block] * rows.block_size + position % rows.block_size;
            std::memmove(tables.data() + left * blocks, table, blocks * sizeof(int32_t));
            std::memcpy(next.data + left * width, normed.data + i * width, width * sizeof(T));
            who[left] = s, next_ids[left] = id, positions[left] = position, next_lens[left] = lens[s];
            left++;
        }
        live = left;
        rows = Rows{slots.data(), starts.data(), next_lens.data(), tables.data(), nullptr, nullptr,
                    nullptr, live, live, blocks, rows.block_size, 0, nullptr, 0};
        ids = next_ids.data(), entering = next.data, logit_rows = firsts.data();
        for (Angles &each : angles) each.rows = positions.data();
    }
}

}  // namespace

// Computes qkv[rows, all heads of q, k and v] from hidden[rows, hidden]; cos and sin [rows, angles] are in
// the layer's dtype, or in float if `angles_f32`. `threads` 0 takes OpenMP's number.
extern "C" void vb_layer_before(const Layer *l, const void *hidden, int64_t rows, const void *cos,
                                const void *sin, int64_t angles, int angles_f32, void *qkv,
                                int threads) {
    before(*l, hidden, rows, {}, Angles{cos, sin, angles, nullptr, angles_f32}, qkv, threads);
}

// Computes out[rows, hidden] from the residual hidden[rows, hidden] and attended[rows, heads * value_dim],
// the output of attention, which may be overwritten; it is multiplied with the gates in `qkv`. If the MLP is
// not part of the layer, its input is written to `normed` [rows, hidden]; else that is null. The rows' experts
// are recorded in `chosen`, or taken from `forced`, with rows `stride` apart (experts.h); both may be null.
extern "C" void vb_layer_after(const Layer *l, const void *hidden, void *attended, const void *qkv,
                               int64_t rows, int16_t *chosen, const int16_t *forced, int64_t stride,
                               void *out, void *normed, int threads) {
    const Scratch<char> expanded(l->absorbed ? rows * attended_bytes(*l) : 0);
    if (l->absorbed) {
        expand_values(*l, (const void *)attended, rows, (void *)expanded.data, threads);
        attended = expanded.data;
    }
    apply_gates(*l, attended, qkv, rows, threads);
    after(*l, hidden, attended, rows, {}, Record{chosen, forced, stride}, out, normed, threads);
}

// Whether a product with all of `matrices` is large enough for several threads.
static bool is_shared(const Matrix *matrices, int count, int64_t rows, int threads) {
    int64_t numbers = 0;
    for (int i = 0; i < count; i++) numbers += matrices[i].cols * matrices[i].depth;
    return threads_for(rows * numbers, numbers, threads) > 1;
}

// Whether any product of a layer or a model is. An idle team takes processors from other programs, and it
// costs an OpenMP barrier at its beginning and end.
static bool shares_products(const Layer &l, int64_t rows, int threads) {
    return l.mixture || is_shared(l.inputs, l.num_inputs, rows, threads) ||
           is_shared(&l.output, 1, rows, threads) || is_shared(l.gates, l.num_gates, rows, threads) ||
           is_shared(&l.down, 1, rows, threads);
}

static bool shares_products(const Model &m, int64_t rows, int64_t logit_rows, int threads) {
    const auto shares = [=](const Layer *l) { return shares_products(*l, rows, threads); };
    return std::any_of(m.layers, m.layers + m.count, shares) || is_shared(&m.head, 1, logit_rows, threads);
}

// Runs a whole layer.
extern "C" void vb_layer(const Layer *l, const Rows *rows, void *k_store, void *v_store,
                         const void *hidden, const void *cos, const void *sin, int64_t angles,
                         int angles_f32, int16_t *chosen, const int16_t *forced, int64_t stride,
                         void *out, void *normed, int threads) {
    const auto run = [&] {
        whole(*l, *rows, k_store, v_store, hidden, Angles{cos, sin, angles, nullptr, angles_f32},
              {chosen, forced, stride}, out, normed, threads);
    };
    with_team(shares_products(*l, rows->count, threads) ? threads : 1, run);
}

// Runs the whole model on the embeddings hidden[rows, hidden], which it overwrites: computes normed [count,
// hidden] and logits [count, vocabulary] of the rows `logit_rows`. `stores` holds K and V of the first layer,
// of the second, and so on; `angles` is indexed by `Layer.angles`. `chosen` and `forced` are [rows, layers
// with experts, top_k], or null. For a model without a head, i.e. a stage of some layers, `count` must be 0,
// and hidden becomes the output of the last layer. Unless `kept` [slots, hidden] is null, the final norm's
// output of all rows goes there.
extern "C" void vb_model(const Model *m, const Rows *rows, void *const *stores, void *hidden,
                         const Angles *angles, int16_t *chosen, const int16_t *forced,
                         const int64_t *logit_rows, int64_t count, void *normed, void *logits,
                         void *kept, int threads) {
    if (threads <= 0) threads = omp_get_max_threads();
    int64_t stride = 0;
    for (int64_t i = 0; i < m->count; i++)
        if (const Mixture *mixture = m->layers[i]->mixture) stride += mixture->router.top_k;
    const Record all{chosen, forced, stride};
    const auto run = [&] {
        run_layers(*m, *rows, stores, hidden, angles, all, logit_rows, count, normed, logits, kept,
                   threads);
    };
    with_team(shares_products(*m, rows->count, count, threads) ? threads : 1, run);
}

// Computes the input out[rows, hidden] of a draft model's layers from the tokens `ids` and the hidden states
// `entering` [rows, hidden]; if null, embeddings take their place.
extern "C" void vb_enter(const Entry *e, const int64_t *ids, const void *entering, int64_t rows, void *out,
                         int threads) {
    if (e->is_bf16) enter(*e, ids, (const bf16 *)entering, rows, (bf16 *)out, threads);
    else enter(*e, ids, (const float *)entering, rows, (float *)out, threads);
}

// Draws up to lengths[s] tokens after each sequence s into drawn[sequences, most], with one forward per
// token, by a draft model that gets the last drawn token and, after the first one, its own hidden state. If
// no token can be drawn, the rest of a row of `drawn` is unchanged. `logit_rows` has the last row of each
// sequence in the first forward; `samples` draw the first tokens. The rest is as in vb_model, without states,
// adapters and records.
extern "C" void vb_chain(const Model *m, const Entry *e, const Rows *rows, void *const *stores,
                         const int64_t *ids, const void *entering, const Angles *angles,
                         int64_t num_angles, const int64_t *logit_rows, const sampling::SampleRow *samples,
                         const int32_t *lengths, int64_t most, int32_t *drawn, int threads) {
    const std::vector<Angles> found(angles, angles + num_angles);
    if (threads <= 0) threads = omp_get_max_threads();
    const auto run = [&] {
        if (e->is_bf16)
            chain(*m, *e, *rows, stores, ids, (const bf16 *)entering, found, logit_rows, samples, lengths,
                  most, drawn, threads);
        else
            chain(*m, *e, *rows, stores, ids, (const float *)entering, found, logit_rows, samples, lengths,
                  most, drawn, threads);
    };
    with_team(shares_products(*m, rows->count, rows->sequences, threads) ? threads : 1, run);
}

// Calls `work`, with a team for the kernels that it calls.
using Work = void();
extern "C" void vb_with_team(Work *work, int threads) { with_team(threads, work); }

// Sizes of the structs, to check declarations in other languages.
extern "C" int64_t vb_layer_size() { return sizeof(Layer); }
extern "C" int64_t vb_delta_size() { return sizeof(DeltaRule); }
extern "C" int64_t vb_mamba2_size() { return sizeof(Mamba2); }
extern "C" int64_t vb_conv_size() { return sizeof(ShortConv); }
extern "C" int64_t vb_mixture_size() { return sizeof(Mixture); }
extern "C" int64_t vb_entry_size() { return sizeof(Entry); }
extern "C" int64_t vb_model_size() { return sizeof(Model); }
extern "C" int64_t vb_angles_size() { return sizeof(Angles); }
