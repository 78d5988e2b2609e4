// Products of bf16 pairs, by one instruction or by float arithmetic.
//
// AVX-512's dot product adds to each lane the product of two odd elements, then that of two even ones. It
// rounds both sums, and flushes subnormal operands and results to zero. So two float multiply-adds in this
// order give the same bits under FlushSubnormals. They are used where the instruction does not exist, and on
// some processors they are twice as fast.
#pragma once

#include "simd.h"

#include <algorithm>
#include <atomic>
#include <cmath>

namespace vb {

// 1: use floats, 0: use pairs, -1: what is faster. Without the instruction, floats are always used.
inline std::atomic<int> chosen_width = -1;

// Access to the register that says whether this thread's float arithmetic flushes subnormals.
struct Subnormals {
#if defined(__x86_64__)
    typedef uint32_t Control;
    static constexpr Control FLUSH = 0x8040;
    static Control read() { return _mm_getcsr(); }
    static void write(Control control) {
        asm volatile("" ::: "memory");  // some compilers move loads and stores across the next line
        _mm_setcsr(control);
        asm volatile("" ::: "memory");
    }
#elif defined(__aarch64__)
    typedef uint64_t Control;
    static constexpr Control FLUSH = 1 << 24;
    static Control read() {
        Control control;
        asm volatile("mrs %0, fpcr" : "=r"(control));
        return control;
    }
    static void write(Control control) { asm volatile("msr fpcr, %0" : : "r"(control) : "memory"); }
#else  // never: results of this size differ from those of other processors
    typedef uint32_t Control;
    static constexpr Control FLUSH = 0;
    static Control read() { return 0; }
    static void write(Control) {}
#endif
};

// Flushes subnormals during its lifetime, if ON.
template <bool ON> class FlushSubnormals : Subnormals {
    const Control before = ON ? read() : 0;

  public:
    FlushSubnormals() {
        if constexpr (ON) write(before | FLUSH);
    }
    ~FlushSubnormals() {
        if constexpr (ON) write(before);
    }
};

// Keeps subnormals during its lifetime.
class KeepSubnormals : Subnormals {
    const Control before = read();

  public:
    KeepSubnormals() { write(before & ~FLUSH); }
    ~KeepSubnormals() { write(before); }
};

#if defined(__AVX512BF16__)
// Cycles of 500 times twelve independent steps.
template <class Step> static inline int64_t cycles_of(Step step) {
    int64_t best = INT64_MAX;
    for (int round = 0; round < 8; round++) {
        const auto begin = (int64_t)__builtin_ia32_rdtsc();
        const f32x16 zero = splat(0.0f);
        f32x16 a = zero, b = zero, c = zero, d = zero, e = zero, f = zero;
        f32x16 g = zero, h = zero, i = zero, j = zero, k = zero, l = zero;
        for (int n = 0; n < 500; n++) {
            step(a), step(b), step(c), step(d), step(e), step(f);
            step(g), step(h), step(i), step(j), step(k), step(l);
        }
        best = std::min(best, (int64_t)__builtin_ia32_rdtsc() - begin);
    }
    return best;
}

// Whether floats give the bits of pairs on this processor, for numbers of all sizes.
static inline bool floats_agree() {
    const FlushSubnormals<true> flush;
    uint32_t state = 1;
    const auto random = [&] {
        state ^= state << 13, state ^= state >> 17, state ^= state << 5;
        return state;
    };
    const auto element = [&](uint32_t exponent) {  // 0: any bits
        const uint32_t bits = random();
        return exponent ? (bits & 0x807f) | (exponent + random() % 8) << 7 : bits & 0xffff;
    };
    // Numbers of any size, of a size near 1, and with products near the smallest normal number.
    constexpr uint32_t EXPONENTS[] = {0, 120, 60};
    for (int round = 0; round < 300; round++) {
        const uint32_t exponent = EXPONENTS[round % 3];
        u32x16 a, b, sum;
        for (int i = 0; i < 16; i++) {
            a[i] = element(exponent) << 16 | element(exponent);
            b[i] = element(exponent) << 16 | element(exponent);
            const uint32_t lowest = exponent == 120 ? 113 : 0;  // that of a product
            sum[i] = exponent ? (random() & 0x807fffff) | (lowest + random() % 16) << 23 : random();
        }
        const f32x16 pairs = (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
        const f32x16 odd = fma(odd_elements(a), odd_elements(b), (f32x16)sum);
        const f32x16 floats = fma(even_elements(a), even_elements(b), odd);
        for (int i = 0; i < 16; i++)
            if (std::isnan(pairs[i]) != std::isnan(floats[i]) ||
                (!std::isnan(pairs[i]) && ((u32x16)pairs)[i] != ((u32x16)floats)[i]))
                return false;
    }
    return true;
}

// Whether to use floats: as chosen, or if this processor is faster with them, which is measured once.
inline bool uses_floats() {
    if (const int chosen = chosen_width.load(std::memory_order_relaxed); chosen >= 0) return chosen;
    static const bool faster = [] {
        const f32x16 one = splat(1.0f);
        const int64_t pairs = cycles_of([&](f32x16 &sum) {
            asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sum) : "v"(one));
        });
        const int64_t floats = cycles_of([&](f32x16 &sum) {
            asm volatile("vfmadd231ps %1, %1, %0" : "+v"(sum) : "v"(one));
        });
        // A float product has half as many multiplications, and widening takes time.
        return 5 * floats < 2 * pairs;
    }();
    return faster;
}
#else
static inline bool floats_agree() { return true; }
inline bool uses_floats() { return true; }
#endif

}  // namespace vb
