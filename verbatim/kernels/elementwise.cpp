// Norms and activations as separate calls, for layers that run module by module.

#include "elementwise.h"

using namespace vb;

namespace {

constexpr int64_t PIECE = 1 << 12;  // elements of a flat tensor per task

template <typename T>
void activate(T *out, const T *gate, const T *up, int64_t count, int activation, int threads) {
    each_row((count + PIECE - 1) / PIECE, PIECE, threads, [&](int64_t piece) {
        const int64_t from = piece * PIECE, width = count - from < PIECE ? count - from : PIECE;
        activate_row(out + from, gate + from, up ? up + from : nullptr, width, activation);
    });
}

}  // namespace

// Computes out[rows, width], the norm of x[rows, width]; the kind of norm is not NONE.
#define EXPORT_NORM(name, T)                                                                       \
    extern "C" void name(T *out, const T *x, const Norm *norm, int64_t rows, int threads) {        \
        const int64_t width = norm->width;                                                         \
        each_row(rows, width, threads,                                                             \
                 [&](int64_t r) { norm_row(out + r * width, x + r * width, *norm); });             \
    }
EXPORT_NORM(vb_norm_f32, float)
EXPORT_NORM(vb_norm_bf16, bf16)
extern "C" int64_t vb_norm_size() { return sizeof(Norm); }

// out[count] = act(gate[count]) * up[count], or act(gate[count]) if `up` is null.
#define EXPORT_ACTIVATE(name, T)                                                                   \
    extern "C" void name(T *out, const T *gate, const T *up, int64_t count, int activation,        \
                         int threads) {                                                            \
        activate(out, gate, up, count, activation, threads);                                       \
    }
EXPORT_ACTIVATE(vb_activate_f32, float)
EXPORT_ACTIVATE(vb_activate_bf16, bf16)
