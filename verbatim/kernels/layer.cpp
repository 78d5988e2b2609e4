// A decoder layer in two calls, of what comes before its attention and what comes after; or in one,
// where K and V lie in plain blocks; or all layers of a model with its head in one.
//
// The products, norms and activations are the ones that the same modules run with one by one, in
// the same order and with the same roundings, so the bits are the same too.

#include "attention.h"
#include "experts.h"

using namespace vb;

namespace {

// As verbatim/model/structs.py declares it.
struct Layer {
    Matrix inputs[3];  // of q, k and v; or one of all three
    Matrix output;     // of attention
    Matrix gates[2];   // gate and up; or one of both
    Matrix down;
    Norm before_attention, of_queries, of_keys, after_attention, before_mlp, after_mlp;
    int64_t hidden, heads, kv_heads, head_dim, value_dim;
    int32_t num_inputs, num_gates;
    int32_t activation, rotation;
    float residual_scale;  // of what is added to the residual
    int32_t is_bf16;
    float scale, softcap;  // of attention
    int64_t window;
    const void *sinks;       // of attention, [heads], or null
    const Mixture *mixture;  // in place of gates and down, or null; without either the MLP is elsewhere

    bool has_mlp() const { return num_gates || mixture; }
};

// The rows of one forward, and where their K and V go and are read, as verbatim/model/direct.py
// declares it.
struct Rows {
    const int64_t *slots;
    const int32_t *query_starts, *context_lens, *block_tables;
    int64_t count, sequences, max_blocks, block_size;
};

// As verbatim/model/whole.py declares it.
struct Model {
    const Layer *const *layers;  // with their MLPs
    int64_t count;
    Norm norm;    // behind the last of them
    Matrix head;  // [vocabulary, hidden]
};

// Cosines and sines [?, width], in the layer's dtype or in float, and which row of them is whose: null
// gives each its own.
struct Angles {
    const void *cos, *sin;
    int64_t width;
    int is_f32;
    const int64_t *rows;
};

// A norm of the width of one head is one for each head, else it is one for all of them.
template <typename T> void norm_heads(T *x, int64_t width, const Norm &norm) {
    if (norm.kind == NONE) return;
    for (int64_t at = 0; at < width; at += norm.width) norm_row(x + at, x + at, norm);
}

template <typename T, typename A>
void before(const Layer &l, const T *hidden, int64_t rows, const Angles &angles, T *qkv,
            int threads) {
    const int64_t q_width = l.heads * l.head_dim, k_width = l.kv_heads * l.head_dim;
    const int64_t width = q_width + k_width + l.kv_heads * l.value_dim;
    const T *x = hidden;
    Scratch<T> normed(l.before_attention.kind == NONE ? 0 : rows * l.hidden);
    if (l.before_attention.kind != NONE) {
        each_row(rows, l.hidden, threads, [&](int64_t r) {
            norm_row(normed.data + r * l.hidden, hidden + r * l.hidden, l.before_attention);
        });
        x = normed.data;
    }
    multiply(x, rows, l.hidden, l.inputs, l.num_inputs, qkv, width, threads);
    if (l.of_queries.kind == NONE && l.of_keys.kind == NONE && l.rotation == UNTURNED) return;
    each_row(rows, q_width + k_width, threads, [&](int64_t r) {
        T *row = qkv + r * width;
        norm_heads(row, q_width, l.of_queries);
        norm_heads(row + q_width, k_width, l.of_keys);
        if (l.rotation == UNTURNED) return;
        const int64_t at = (angles.rows ? angles.rows[r] : r) * angles.width;
        const A *cos = (const A *)angles.cos + at, *sin = (const A *)angles.sin + at;
        for (int64_t h = 0; h < l.heads + l.kv_heads; h++)
            rotate_head(row + h * l.head_dim, cos, sin, angles.width, l.rotation);
    });
}

void before(const Layer &l, const void *hidden, int64_t rows, const Angles &angles, void *qkv,
            int threads) {
    if (!l.is_bf16)
        before<float, float>(l, (const float *)hidden, rows, angles, (float *)qkv, threads);
    else if (angles.is_f32)
        before<bf16, float>(l, (const bf16 *)hidden, rows, angles, (bf16 *)qkv, threads);
    else before<bf16, bf16>(l, (const bf16 *)hidden, rows, angles, (bf16 *)qkv, threads);
}

// hidden + (norm of) the product: the residual after attention, and after the MLP.
template <typename T>
void add_back(const Layer &l, T *out, const T *residual, T *x, int64_t rows, const Norm &norm,
              int threads) {
    each_row(rows, l.hidden, threads, [&](int64_t r) {
        T *row = x + r * l.hidden;
        if (norm.kind != NONE) norm_row(row, row, norm);
        add_row(out + r * l.hidden, residual + r * l.hidden, row, l.hidden, l.residual_scale);
    });
}

// out = the residual after attention. Returns what the MLP is given: `normed`, or out where nothing norms it.
template <typename T>
T *behind_attention(const Layer &l, const T *hidden, const T *attended, int64_t rows, T *out,
                    T *normed, int threads) {
    const Scratch<T> made(rows * l.hidden);
    multiply(attended, rows, l.output.depth, &l.output, 1, made.data, l.hidden, threads);
    add_back(l, out, hidden, made.data, rows, l.after_attention, threads);
    if (l.before_mlp.kind == NONE) return out;
    each_row(rows, l.hidden, threads, [&](int64_t r) {
        norm_row(normed + r * l.hidden, out + r * l.hidden, l.before_mlp);
    });
    return normed;
}

// out += what the MLP makes of x.
template <typename T>
void add_mlp(const Layer &l, const T *x, int64_t rows, Chosen chosen, T *out, int threads) {
    const Scratch<T> made(rows * l.hidden);
    if (l.mixture) run_mixture(*l.mixture, x, rows, chosen, made.data, threads);
    else run_mlp(l.gates, l.num_gates, l.down, l.activation, x, rows, made.data, threads);
    add_back(l, out, out, made.data, rows, l.after_mlp, threads);
}

// Room for the experts of some rows of a layer; nothing where it has none.
struct Choice {
    int64_t top_k;
    Scratch<int32_t> experts;
    Scratch<float> weights;
    Choice(const Layer &l, int64_t rows)
        : top_k(l.mixture ? l.mixture->router.top_k : 0), experts(rows * top_k),
          weights(rows * top_k) {}
    Chosen chosen() const { return {experts.data, weights.data}; }
};

// out = what the layer returns; or, where the MLP is not in here, the residual after attention,
// with what the MLP must be given in `normed`.
template <typename T>
void after(const Layer &l, const T *hidden, const T *attended, int64_t rows, const Record &record,
           T *out, T *normed, int threads) {
    if (!l.has_mlp()) {
        const T *x = behind_attention(l, hidden, attended, rows, out, normed, threads);
        if (x != normed) std::memcpy(normed, x, rows * l.hidden * sizeof(T));
        return;
    }
    const Scratch<T> room(rows * l.hidden);
    const T *x = behind_attention(l, hidden, attended, rows, out, room.data, threads);
    const Choice choice(l, rows);
    if (l.mixture) route(l.mixture->router, x, rows, record, choice.chosen(), threads);
    add_mlp(l, x, rows, choice.chosen(), out, threads);
}

void after(const Layer &l, const void *hidden, const void *attended, int64_t rows,
           const Record &record, void *out, void *normed, int threads) {
    if (l.is_bf16)
        after(l, (const bf16 *)hidden, (const bf16 *)attended, rows, record, (bf16 *)out,
              (bf16 *)normed, threads);
    else
        after(l, (const float *)hidden, (const float *)attended, rows, record, (float *)out,
              (float *)normed, threads);
}

// The rows' K and V are written to the stores, and `attended` [rows, heads * value_dim] is what they attend to.
void attend(const Layer &l, const Rows &rows, void *k_store, void *v_store, const void *hidden,
            const Angles &angles, char *attended, int threads) {
    const int64_t q_width = l.heads * l.head_dim, k_width = l.kv_heads * l.head_dim;
    const int64_t width = q_width + k_width + l.kv_heads * l.value_dim;
    const int64_t size = l.is_bf16 ? 2 : 4;
    Scratch<char> qkv(rows.count * width * size);
    before(l, hidden, rows.count, angles, qkv.data, threads);
    const char *k = qkv.data + q_width * size, *v = k + k_width * size;
    vb_write_kv(k, v, (char *)k_store, (char *)v_store, rows.slots, rows.count, l.kv_heads,
                rows.block_size, l.head_dim * size, l.value_dim * size, width * size,
                l.head_dim * size, width * size, l.value_dim * size, threads);
    const Scratch<float> sinks(l.sinks ? l.heads : 0);
    for (int64_t h = 0; l.sinks && h < l.heads; h++)
        sinks.data[h] = l.is_bf16 ? to_float(((const bf16 *)l.sinks)[h]) : ((const float *)l.sinks)[h];
    vb_attention(qkv.data, attended, k_store, v_store, rows.query_starts, rows.context_lens,
                 rows.block_tables, rows.sequences, rows.max_blocks, width, l.head_dim, l.heads,
                 l.kv_heads, l.head_dim, l.value_dim, rows.block_size, l.window, l.is_bf16,
                 l.is_bf16, l.scale, l.softcap, l.sinks ? sinks.data : nullptr, nullptr, threads);
}

// Bytes of a row of `attended`.
int64_t attended_bytes(const Layer &l) { return l.heads * l.value_dim * (l.is_bf16 ? 2 : 4); }

void whole(const Layer &l, const Rows &rows, void *k_store, void *v_store, const void *hidden,
           const Angles &angles, const Record &record, void *out, void *normed, int threads) {
    const Scratch<char> attended(rows.count * attended_bytes(l));
    attend(l, rows, k_store, v_store, hidden, angles, attended.data, threads);
    after(l, hidden, attended.data, rows.count, record, out, normed, threads);
}

// to[i] = from[rows[i]], of `bytes` each.
void take_rows(void *to, const void *from, const int64_t *rows, int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; i++)
        std::memcpy((char *)to + i * bytes, (const char *)from + rows[i] * bytes, bytes);
}

// The last layer, the last norm and the head. Behind attention only the rows that need logits are
// computed; of the others, where the layer has experts, no more than which ones they choose.
template <typename T>
void finish(const Model &m, const Rows &rows, void *k_store, void *v_store, const T *hidden,
            const Angles &angles, const Record &record, const int64_t *logit_rows, int64_t count,
            T *normed, T *logits, int threads) {
    const Layer &l = *m.layers[m.count - 1];
    const int64_t width = m.norm.width, bytes = attended_bytes(l);
    const Scratch<char> attended(rows.count * bytes);
    attend(l, rows, k_store, v_store, hidden, angles, attended.data, threads);
    const Scratch<T> kept(count * width), x(count * width);
    const Choice choice(l, count);
    const T *given = x.data;
    if (!l.mixture) {
        const Scratch<char> theirs(count * bytes);
        take_rows(kept.data, hidden, logit_rows, count, width * sizeof(T));
        take_rows(theirs.data, attended.data, logit_rows, count, bytes);
        given = behind_attention(l, kept.data, (const T *)theirs.data, count, kept.data, x.data,
                                 threads);
    } else {
        const Scratch<T> residual(rows.count * width), room(rows.count * width);
        const Choice all(l, rows.count);
        const T *of_all = behind_attention(l, hidden, (const T *)attended.data, rows.count,
                                           residual.data, room.data, threads);
        route(l.mixture->router, of_all, rows.count, record, all.chosen(), threads);
        take_rows(kept.data, residual.data, logit_rows, count, width * sizeof(T));
        take_rows(x.data, of_all, logit_rows, count, width * sizeof(T));
        take_rows(choice.experts.data, all.experts.data, logit_rows, count, choice.top_k * 4);
        take_rows(choice.weights.data, all.weights.data, logit_rows, count, choice.top_k * 4);
    }
    add_mlp(l, given, count, choice.chosen(), kept.data, threads);
    each_row(count, width, threads, [&](int64_t r) {
        norm_row(normed + r * width, kept.data + r * width, m.norm);
    });
    multiply(normed, count, width, &m.head, 1, logits, m.head.cols, threads);
}

}  // namespace

// qkv[rows, all heads of q, k and v] of hidden[rows, hidden]; cos and sin [rows, angles] are in the
// layer's dtype, or in float where `angles_f32` says so. `threads` 0 takes OpenMP's number.
extern "C" void vb_layer_before(const Layer *l, const void *hidden, int64_t rows, const void *cos,
                                const void *sin, int64_t angles, int angles_f32, void *qkv,
                                int threads) {
    before(*l, hidden, rows, Angles{cos, sin, angles, angles_f32, nullptr}, qkv, threads);
}

// out[rows, hidden] of the residual hidden[rows, hidden] and of attended[rows, heads * value_dim].
// `normed` [rows, hidden] is what the MLP must be given, where it is not in the layer; else null. The rows'
// experts are recorded in `chosen`, or taken from `forced`, `stride` apart (experts.h); both may be null.
extern "C" void vb_layer_after(const Layer *l, const void *hidden, const void *attended,
                               int64_t rows, int16_t *chosen, const int16_t *forced, int64_t stride,
                               void *out, void *normed, int threads) {
    after(*l, hidden, attended, rows, {chosen, forced, stride}, out, normed, threads);
}

// Whether any product of the model is large enough for several threads. A team that only waits takes
// processors from other programs, and an OpenMP barrier to begin and end.
static bool shares_products(const Model &m, int64_t rows, int64_t logit_rows, int threads) {
    const auto shared = [&](const Matrix *matrices, int count, int64_t rows) {
        int64_t numbers = 0;
        for (int i = 0; i < count; i++) numbers += matrices[i].cols * matrices[i].depth;
        return threads_for(rows * numbers, numbers, threads) > 1;
    };
    for (int64_t i = 0; i < m.count; i++) {
        const Layer &l = *m.layers[i];
        if (l.mixture || shared(l.inputs, l.num_inputs, rows) || shared(&l.output, 1, rows) ||
            shared(l.gates, l.num_gates, rows) || shared(&l.down, 1, rows))
            return true;
    }
    return shared(&m.head, 1, logit_rows);
}

// The whole layer.
extern "C" void vb_layer(const Layer *l, const Rows *rows, void *k_store, void *v_store,
                         const void *hidden, const void *cos, const void *sin, int64_t angles,
                         int angles_f32, int16_t *chosen, const int16_t *forced, int64_t stride,
                         void *out, void *normed, int threads) {
    whole(*l, *rows, k_store, v_store, hidden, Angles{cos, sin, angles, angles_f32, nullptr},
          {chosen, forced, stride}, out, normed, threads);
}

// The whole model, of which hidden[rows, hidden] are the embeddings, which it overwrites: normed
// [count, hidden] and logits [count, vocabulary] of the rows `logit_rows`. `stores` holds K and V of the
// first layer, of the second, and so on; `angle_rows` is null, or where in cos and sin a row's angles
// are. `chosen` and `forced` are [rows, layers with experts, top_k], or null. Of a model without a head, that
// is some layers of one, hidden becomes the output of the last layer, and `count` must be 0.
extern "C" void vb_model(const Model *m, const Rows *rows, void *const *stores, void *hidden,
                         const void *cos, const void *sin, int64_t angles, int angles_f32,
                         const int64_t *angle_rows, int16_t *chosen, const int16_t *forced,
                         const int64_t *logit_rows, int64_t count, void *normed, void *logits,
                         int threads) {
    const Angles found{cos, sin, angles, angles_f32, angle_rows};
    if (threads <= 0) threads = omp_get_max_threads();
    int64_t stride = 0;
    for (int64_t i = 0; i < m->count; i++)
        if (const Mixture *mixture = m->layers[i]->mixture) stride += mixture->router.top_k;
    const Record all{chosen, forced, stride};
    const auto run = [&] {
        const int64_t last = m->head.data ? m->count - 1 : m->count;
        int64_t routed = 0;
        const auto record = [&](const Layer &l) {
            return l.mixture ? all.layer(routed++, l.mixture->router.top_k) : Record{};
        };
        for (int64_t i = 0; i < last; i++)
            whole(*m->layers[i], *rows, stores[2 * i], stores[2 * i + 1], hidden, found,
                  record(*m->layers[i]), hidden, nullptr, threads);
        if (last == m->count) return;
        void *k = stores[2 * last], *v = stores[2 * last + 1];
        const Record own = record(*m->layers[last]);
        if (m->layers[last]->is_bf16)
            finish(*m, *rows, k, v, (const bf16 *)hidden, found, own, logit_rows, count,
                   (bf16 *)normed, (bf16 *)logits, threads);
        else
            finish(*m, *rows, k, v, (const float *)hidden, found, own, logit_rows, count,
                   (float *)normed, (float *)logits, threads);
    };
    if (shares_products(*m, rows->count, count, threads)) with_team(threads, run);
    else run();
}

// Bytes of a Layer, of a Mixture, and of a Model, for the one who declares them elsewhere.
extern "C" int64_t vb_layer_size() { return sizeof(Layer); }
extern "C" int64_t vb_mixture_size() { return sizeof(Mixture); }
extern "C" int64_t vb_model_size() { return sizeof(Model); }
