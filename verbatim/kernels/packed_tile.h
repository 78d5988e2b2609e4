// A tile with weights that are dequantized in registers, for so few rows that memory bandwidth is the limit.
#pragma once

#include "packed.h"
#include "tile.h"

namespace {

// Sums of columns over all of K, with each stream prefetched. False: the weights need the slow rounding.
template <int R, int C, int CODE, int GROUP>
static INLINE inline bool packed_sums(Accumulators<R, C> &acc, const Place<bf16> &p,
                                      const uint8_t *const (&w)[C], const RowLayout &row,
                                      const Stream &stream) {
    constexpr int BYTES = bytes_of(CODE, GROUP);
    constexpr int TOGETHER = HAS_PAIRS ? C : 1;  // columns whose weights fit registers
    using OfGroups = std::conditional_t<in_blocks(CODE), BlockHeads<CODE>, Heads>;
    const f32x16 numbers = load(row.numbers());
    const auto ahead_of = [&](int64_t at) INLINE {
        return at + AHEAD_BYTES + (at + AHEAD_BYTES < stream.end ? 0 : stream.jump);
    };
    const auto *x = p.x;
    OfGroups heads[C];
    bool quick = true;
    int64_t at = 0;
    // Adds `count` groups, from the `i`th of `heads` on.
    const auto add = [&](auto count, int i) INLINE {
        const int64_t ahead = ahead_of(at);
        each<C>([&](auto c) INLINE {
            for (int b = 0; b < count * BYTES; b += 64) prefetch<false>(w[c] + ahead + b);
        });
        each<count>([&](auto n) INLINE {
            each<C / TOGETHER>([&](auto some) INLINE {
                constexpr int FIRST = some * TOGETHER;
                const auto weights = array_of<TOGETHER>([&](auto c) INLINE {
                    const uint8_t *codes = w[FIRST + c] + at + n * BYTES;
                    return weights_by_step<CODE, GROUP>(codes, heads[FIRST + c], i + n, numbers);
                });
                each<GROUP / 32>([&](auto step) INLINE {
                    const auto of_step = array_of<TOGETHER>([&](auto c) INLINE { return weights[c](step); });
                    each<PARTS<bf16>>([&](auto part) INLINE {
                        each<R>([&](auto r) INLINE {
                            const auto inputs = part_of<part>(x + GROUP * R * n + 32 * (step * R + r));
                            each<TOGETHER>([&](auto c) INLINE {
                                auto &sum = acc.of(r, FIRST + c);
                                sum = mac(sum, inputs, part_of<part>(of_step[c]));
                            });
                        });
                    });
                });
            });
        });
        at += count * BYTES, x += count * GROUP * R;
    };
    for (int64_t g = 0; g < row.whole; g += OfGroups::COUNT) {
        const int count = (int)std::min<int64_t>(OfGroups::COUNT, row.whole - g);
        each<C>([&](auto c) INLINE {
            if constexpr (in_blocks(CODE)) quick &= heads[c].read(w[c] + at);
            else quick &= heads[c].read(row, w[c] + row.code_bytes + g * row.head_bytes, count);
        });
        constexpr int LINE = std::max(1, 64 / BYTES);  // groups per cache line
        int i = 0;
        for (; i + LINE <= count; i += LINE) add(std::integral_constant<int, LINE>(), i);
        if (LINE > 1)
            for (; i < count; i++) add(std::integral_constant<int, 1>(), i);
    }
    if (!quick) return false;
    for (int c = 0; c < C; c++) {
        for (int64_t b = row.code_bytes; b < row.bytes; b += 64)
            prefetch<false>(w[c] + ahead_of(b));
    }
    if constexpr (!in_blocks(CODE)) if (row.rest) {
        bf16 last[C][GROUP];
        const bf16 *rest[C];
        for (int c = 0; c < C; c++) {
            const KeepSubnormals keep;  // as the other weights are rounded
            const uint8_t *codes = w[c] + row.whole * BYTES;
            const uint8_t *head = w[c] + row.code_bytes + row.whole * row.head_bytes;
            short_group<CODE>(last[c], codes, row.rest, head_at(row, head), row.numbers());
            rest[c] = last[c];
        }
        steps(acc, x, STEP<bf16>, R, rest, 0, row.rest, Later<0>{});
    }
    return true;
}

// Like lone_strip, for interleaved rows. False, with only some columns stored: they need the slow rounding.
template <int R, int C, int CODE, int GROUP>
static NOINLINE bool packed_strip(const Place<bf16> &p, const uint8_t *weights,
                                  const RowLayout &layout, int64_t width, const char *after) {
    const RowLayout row = layout;
    bool all = true;
    each_in_streams<C>(width, (const char *)weights, row.bytes, row.bytes, after,
                       [&](Columns at, const char *first, int64_t apart, Stream stream) INLINE {
        const uint8_t *w[C];
        begins(w, (const uint8_t *)first, apart, at.count);
        Accumulators<R, C> acc;
        acc.clear();
        all = all && packed_sums<R, C, CODE, GROUP>(acc, p, w, row, stream);
        if (all) finish_all(p, at, acc);
    });
    return all;
}

}  // namespace
