// Vectors of sixteen lanes, in as many registers as they take.
//
// gcc keeps a vector that is longer than a register in memory. Such a vector is a Twice here: two vectors of
// half its length, and so on down to native ones (`vector_size`) that fit a register.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define INLINE __attribute__((always_inline))

namespace vb {

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

template <class Half> struct Twice;
template <class V> constexpr bool IS_TWICE = false;
template <class Half> constexpr bool IS_TWICE<Twice<Half>> = true;

// N lanes of E. Lanes shorter than 32 bits are divided as if they had 32, so that halves widen to halves.
template <class E, int N, bool FITS = N * (sizeof(E) < 4 ? 4 : sizeof(E)) <= REGISTER> struct VectorOf {
    typedef E type __attribute__((vector_size(N * sizeof(E))));
};
template <class E, int N> struct VectorOf<E, N, false> {
    typedef Twice<typename VectorOf<E, N / 2>::type> type;
};
template <class E, int N> using Vector = typename VectorOf<E, N>::type;

template <class V> struct ElementOf {
    typedef std::decay_t<decltype(std::declval<V &>()[0])> type;
};
template <class Half> struct ElementOf<Twice<Half>> : ElementOf<Half> {};
template <class V> using Element = typename ElementOf<V>::type;
template <class V> constexpr int LENGTH = sizeof(V) / sizeof(Element<V>);
template <class V> using AllLanes = std::make_integer_sequence<int, LENGTH<V>>;

// x in every lane, copied: zero plus -0 would be 0.
template <class V, int... I>
static INLINE inline V spread(Element<V> x, std::integer_sequence<int, I...>) {
    return V{((void)I, x)...};
}
template <class V> static INLINE inline V spread(Element<V> x) {
    if constexpr (IS_TWICE<V>) return x;
    else return spread<V>(x, AllLanes<V>());
}

template <class Half> struct Twice {
    Half low, high;

    Twice() = default;
    INLINE inline Twice(Half low, Half high) : low(low), high(high) {}
    INLINE inline Twice(Element<Half> x) : low(spread<Half>(x)), high(low) {}

    // The same bits as lanes of another type.
    template <class Other> INLINE inline explicit operator Twice<Other>() const {
        return {(Other)low, (Other)high};
    }
    INLINE inline Element<Half> operator[](int i) const {
        return i < LENGTH<Half> ? low[i] : high[i - LENGTH<Half>];
    }

#define LANE_BY_LANE(op)                                                                           \
    friend INLINE inline auto operator op(Twice a, Twice b) {                                      \
        return Twice<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};                  \
    }
    LANE_BY_LANE(+)
    LANE_BY_LANE(-)
    LANE_BY_LANE(*)
    LANE_BY_LANE(/)
    LANE_BY_LANE(&)
    LANE_BY_LANE(|)
    LANE_BY_LANE(^)
    LANE_BY_LANE(<)
    LANE_BY_LANE(<=)
    LANE_BY_LANE(>)
    LANE_BY_LANE(>=)
    LANE_BY_LANE(==)
#undef LANE_BY_LANE
    friend INLINE inline Twice operator-(Twice a) { return {-a.low, -a.high}; }
    friend INLINE inline Twice operator~(Twice a) { return {~a.low, ~a.high}; }
    friend INLINE inline Twice operator<<(Twice a, int n) { return {a.low << n, a.high << n}; }
    friend INLINE inline Twice operator>>(Twice a, int n) { return {a.low >> n, a.high >> n}; }
    INLINE inline Twice &operator+=(Twice b) { return *this = *this + b; }
    INLINE inline Twice &operator-=(Twice b) { return *this = *this - b; }
    INLINE inline Twice &operator&=(Twice b) { return *this = *this & b; }
};

// a where the mask is set, else b.
template <class Mask, class V> static INLINE inline V select(Mask mask, V a, V b) {
    if constexpr (IS_TWICE<V>) return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
    else return mask ? a : b;
}

// A vector from memory, and to memory.
template <class V> static INLINE inline V load_bits(const void *p) {
    if constexpr (IS_TWICE<V>) {
        typedef decltype(V::low) Half;
        return {load_bits<Half>(p), load_bits<Half>((const char *)p + sizeof(Half))};
    } else {
        V v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
}
template <class V> static INLINE inline void store_bits(void *p, V v) {
    if constexpr (IS_TWICE<V>) store_bits(p, v.low), store_bits((char *)p + sizeof v.low, v.high);
    else std::memcpy(p, &v, sizeof v);
}

// The lanes of a native vector from FROM on.
template <int FROM, class V, int... I>
static INLINE inline auto lanes_after(V v, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(v, v, (FROM + I)...);
}
template <class V> static INLINE inline auto low_half(V v) {
    if constexpr (IS_TWICE<V>) return v.low;
    else return lanes_after<0>(v, std::make_integer_sequence<int, LENGTH<V> / 2>());
}
template <class V> static INLINE inline auto high_half(V v) {
    if constexpr (IS_TWICE<V>) return v.high;
    else return lanes_after<LENGTH<V> / 2>(v, std::make_integer_sequence<int, LENGTH<V> / 2>());
}

// The bits of a and then those of b.
template <class V, class Half, int... I>
static INLINE inline V concat(Half a, Half b, std::integer_sequence<int, I...>) {
    return (V)__builtin_shufflevector(a, b, I..., (LENGTH<Half> + I)...);
}
template <class V, class Half> static INLINE inline V concat(Half a, Half b) {
    if constexpr (IS_TWICE<V>) {
        typedef decltype(V::low) Part;
        return {concat<Part>(a.low, a.high), concat<Part>(b.low, b.high)};
    } else {
        return concat<V>(a, b, AllLanes<Half>());
    }
}

// The values of the lanes in another type.
template <class To, class From> static INLINE inline To convert(From v) {
    if constexpr (IS_TWICE<To>) {
        typedef decltype(To::low) Half;
        return {convert<Half>(low_half(v)), convert<Half>(high_half(v))};
    } else {
#if defined(__AVX2__)  // gcc 12 widens in halves
        constexpr bool SIGNED = std::is_signed_v<Element<From>>;
        constexpr bool WIDENS = sizeof(Element<From>) == 2 && sizeof(To) == 2 * sizeof(From);
        if constexpr (WIDENS && sizeof(To) == 32)
            return (To)(SIGNED ? _mm256_cvtepi16_epi32((__m128i)v) : _mm256_cvtepu16_epi32((__m128i)v));
#if defined(__AVX512F__)
        if constexpr (WIDENS && sizeof(To) == 64)
            return (To)(SIGNED ? _mm512_cvtepi16_epi32((__m256i)v) : _mm512_cvtepu16_epi32((__m256i)v));
#endif
#endif
        return __builtin_convertvector(v, To);
    }
}

// The elements of a and b by turns, as punpckl and punpckh do it: of each 16 bytes the low half, or the HIGH.
template <class E, bool HIGH, class V, int... I>
static INLINE inline V zip(V a, V b, std::integer_sequence<int, I...>) {
    typedef E Elements __attribute__((vector_size(sizeof(V))));
    constexpr int N = sizeof...(I), EACH = 16 / sizeof(E), FIRST = HIGH ? EACH / 2 : 0;
    return (V)__builtin_shufflevector((Elements)a, (Elements)b,
                                      (I % 2 * N + I / EACH * EACH + FIRST + I % EACH / 2)...);
}
template <class E, bool HIGH, class V> static INLINE inline V zip(V a, V b) {
    if constexpr (IS_TWICE<V>) return {zip<E, HIGH>(a.low, b.low), zip<E, HIGH>(a.high, b.high)};
    else return zip<E, HIGH>(a, b, std::make_integer_sequence<int, sizeof(V) / sizeof(E)>());
}

// 0, 1, 2, ..
template <class V> static INLINE inline V lane_numbers() {
    static constexpr Element<V> NUMBERS[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_bits<V>(NUMBERS);
}

}  // namespace vb
