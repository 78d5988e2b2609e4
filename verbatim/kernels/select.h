// The tokens that survive top-k, top-p and min-p, by selection: the vocabulary is never sorted.
#pragma once

#include <algorithm>
#include <cfloat>
#include <memory>

#include "logits.h"

namespace vb::sampling {

// Buffers of one thread. They are allocated without being written, so that memory which a row's parameters
// don't need is never touched.
struct Workspace {
    std::unique_ptr<float[]> y, spare_y;
    std::unique_ptr<int32_t[]> id, spare_id;

    explicit Workspace(int64_t vocab)
        : y(new float[vocab + 32]), spare_y(new float[vocab + 32]), id(new int32_t[vocab + 32]),
          spare_id(new int32_t[vocab + 32]) {}
};

// Tokens in the order of their ids. Appending may write up to 16 entries beyond the last.
struct List {
    float *y;
    int32_t *id;
    int64_t n = 0;

    Plain<float> view() const { return {y, n}; }

    void append(f32x16 values, i32x16 ids, uint32_t mask) {
#if defined(__AVX512F__)
        _mm512_storeu_ps(y + n, _mm512_maskz_compress_ps((__mmask16)mask, (__m512)values));
        _mm512_storeu_si512(id + n, _mm512_maskz_compress_epi32((__mmask16)mask, (__m512i)ids));
        n += __builtin_popcount(mask);
#else
        for (; mask; mask &= mask - 1, n++) {
            int j = __builtin_ctz(mask);
            y[n] = values[j];
            id[n] = ids[j];
        }
#endif
    }

    // Loads sixteen entries from i on, and returns the mask of those that exist.
    uint32_t entries(int64_t i, int64_t size, f32x16 &values, i32x16 &ids) const {
        values = load(y + i);
        ids = load_bits<i32x16>(id + i);
        return size - i < 16 ? (1u << (size - i)) - 1 : 0xffffu;
    }

    // Keeps entries above `least`, and those equal to it up to index `last_tie`.
    void keep_from(float least, int64_t last_tie) {
        f32x16 threshold = splat(least), values;
        i32x16 ids;
        int64_t size = n;
        n = 0;
        for (int64_t i = 0; i < size; i += 16) {
            uint32_t mask = entries(i, size, values, ids) & at_least(values, threshold);
            int64_t ties = std::min<int64_t>(std::max<int64_t>(last_tie - i + 1, 0), 16);
            mask &= ~at_least(threshold, values) | ((1u << ties) - 1);
            if (mask) append(values, ids, mask);
        }
    }
};

static inline i32x16 ids_from(int64_t first) {
    return lane_numbers<i32x16>() + (int32_t)first;
}

// Appends every token with a finite logit of at least `least`.
template <typename View> static void collect(const View &view, float least, List &list) {
    f32x16 threshold = splat(std::max(least, -FLT_MAX));
    for (int64_t i = 0; i < view.n; i += 16) {
        f32x16 y = view.block(i);
        uint32_t mask = at_least(y, threshold);
        if (mask) list.append(y, ids_from(i), mask);
    }
}

static float trim(List &list, int64_t k, float *spare) {
    std::copy(list.y, list.y + list.n, spare);
    std::nth_element(spare, spare + k - 1, spare + list.n, std::greater<float>());
    float least = spare[k - 1];
    list.keep_from(least, list.n);
    return least;
}

// Finds the k largest finite logits, and all that tie with the k-th. One pass: the list collects what reaches
// the k-th largest so far, and is trimmed whenever it has grown fourfold.
template <typename View> static void top_k(const View &view, int64_t k, List &list, Workspace &w) {
    float least = -FLT_MAX;
    int64_t limit = std::max<int64_t>(4 * k, 256);
    for (int64_t i = 0; i < view.n; i += 16) {
        f32x16 y = view.block(i);
        uint32_t mask = at_least(y, splat(least));
        if (!mask) continue;
        list.append(y, ids_from(i), mask);
        if (list.n >= limit) {
            least = trim(list, k, w.spare_y.get());
            limit = std::max(limit, 2 * list.n);
        }
    }
    if (list.n > k) trim(list, k, w.spare_y.get());
}

// Keeps everything at least `p` times as likely as the likeliest.
static void min_p(List &list, double max, double p) {
    int64_t kept = 0;
    for (int64_t i = 0; i < list.n; i++) {
        list.y[kept] = list.y[i];
        list.id[kept] = list.id[i];
        kept += exp_falling(list.y[i] - max) >= p;
    }
    list.n = kept;
}

// Keeps the fewest tokens, by logit descending and then id ascending, that reach the mass `wanted`.
//
// Histograms of the mass over the logits' range narrow the search to the bin in which the threshold
// is crossed, until that bin is small or all its logits are equal; only then is anything sorted.
static void top_p(List &list, double max, double wanted, Workspace &w) {
    constexpr int BINS = 1024, SMALL = 256;
    double before = 0;  // mass before the candidates
    List part{w.spare_y.get(), w.spare_id.get(), list.n};  // the candidates; ids are indices of `list`
    std::copy(list.y, list.y + list.n, part.y);
    for (int64_t i = 0; i < list.n; i += 16) store_bits(part.id + i, ids_from(i));
    bool tied = false;
    while (part.n > SMALL) {
        std::fill(part.y + part.n, part.y + part.n + 16, part.y[0]);
        f32x16 high = splat(part.y[0]), low = high;
        for (int64_t i = 0; i < part.n; i += 16) {
            f32x16 y = load(part.y + i);
            high = vb::max(y, high);
            low = select(y < low, y, low);
        }
        float first = max_lane(high), range = first + max_lane(-low);
        if ((tied = range == 0)) break;
        float bins_per_unit = (BINS - 1) / range;
        if (!std::isfinite(range) || !std::isfinite(bins_per_unit)) break;  // then sort all of them
        f32x16 scale = splat(bins_per_unit);
        auto place = [&](f32x16 y) { return (splat(first) - y) * scale; };
        double bins[BINS] = {};
        for (int64_t i = 0; i < part.n; i += 16) {
            f64x8 e[2];
            masses(load(part.y + i), max, e);
            i32x16 bin = convert<i32x16>(place(load(part.y + i)));
            for (int j = 0; j < 16 && i + j < part.n; j++) bins[bin[j]] += e[j / 8][j % 8];
        }
        int bin = 0;
        while (bin < BINS && before + bins[bin] < wanted) before += bins[bin++];
        if (bin == BINS) return;  // only by rounding: all tokens are needed
        int64_t n = part.n;
        part.n = 0;
        for (int64_t i = 0; i < n; i += 16) {
            f32x16 y;
            i32x16 ids;
            uint32_t mask = part.entries(i, n, y, ids);
            f32x16 where = place(y);
            mask &= at_least(where, splat((float)bin)) & ~at_least(where, splat(bin + 1.0f));
            if (mask) part.append(y, ids, mask);
        }
    }
    std::unique_ptr<int32_t[]> order(new int32_t[part.n]);
    for (int64_t i = 0; i < part.n; i++) order[i] = (int32_t)i;
    if (!tied)
        std::sort(order.get(), order.get() + part.n, [&](int32_t a, int32_t b) {
            return part.y[a] != part.y[b] ? part.y[a] > part.y[b] : a < b;
        });
    int32_t last = 0;
    for (int64_t i = 0; i < part.n && before < wanted; i++) {
        last = order[i];
        before += exp_falling(part.y[last] - max);
    }
    list.keep_from(part.y[last], part.id[last]);
}

}  // namespace vb::sampling
