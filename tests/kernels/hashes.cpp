// Calls kernels of the library that argv[1] names, and prints a hash of each result. It runs where
// there is no Python: on another processor, under an emulator (test_compilers.py).

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../verbatim/kernels/matrix.h"

using vb::bf16;

static void *library;

// The kernel of this name, with the types of the arguments that it is called with.
template <typename... Arguments> static void call(const char *name, Arguments... arguments) {
    void *const kernel = dlsym(library, name);
    if (!kernel) std::printf("%s: %s\n", name, dlerror()), std::exit(1);
    ((void (*)(Arguments...))kernel)(arguments...);
}

// FNV-1a over the bytes of a result.
template <typename T> static void report(const std::string &name, const std::vector<T> &result) {
    uint64_t hash = 0xcbf29ce484222325u;
    const unsigned char *const bytes = (const unsigned char *)result.data();
    for (size_t i = 0; i < result.size() * sizeof(T); i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    std::printf("%s %016llx\n", name.c_str(), (unsigned long long)hash);
}

// Numbers between -scale and scale, always the same.
template <typename T> static std::vector<T> numbers(int64_t count, uint64_t seed, float scale = 1) {
    std::vector<T> values(count);
    for (T &value : values) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        vb::put(&value, (float)(int32_t)(seed >> 32) * 0x1p-31f * scale);
    }
    return values;
}

template <typename T> struct Names {
    static constexpr const char *suffix = sizeof(T) == 2 ? "_bf16" : "_f32";
    std::string operator()(const char *name) const { return std::string(name) + suffix; }
};

// Products: plain weights either way round, then packed ones and their numbers.
template <typename T> static void products(const int64_t ROWS, float scale) {
    const Names<T> named;
    constexpr int64_t COLS = 83, DEPTH = 200, GROUP = 32;
    std::printf("%d rows of numbers up to %g\n", (int)ROWS, scale);
    const auto x = numbers<T>(ROWS * DEPTH, 1, scale), w = numbers<T>(COLS * DEPTH, 2);
    const auto bias = numbers<T>(COLS, 3);
    std::vector<T> out(ROWS * COLS);
    for (const int transposed : {0, 1}) {
        const vb::Matrix matrix{w.data(), bias.data(), COLS, DEPTH, transposed ? COLS : DEPTH,
                                sizeof(T) == 2 ? vb::BF16 : vb::FLOAT, 0, transposed};
        call(named("vb_multiply").c_str(), out.data(), x.data(), ROWS, DEPTH, &matrix, 1, COLS, 0, 1);
        report(named("vb_multiply") + (transposed ? " by columns" : " by rows"), out);
    }
    for (const int bits : {4, 8}) {
        const std::string of_bits = std::to_string(bits);
        std::vector<uint8_t> packed(2 * COLS * DEPTH);
        std::vector<double> squares(2);
        call("vb_pack_rows", packed.data(), w.data(), COLS, DEPTH, bits, (int)GROUP, (int)(sizeof(T) == 2),
             squares.data(), 1);
        report(named("vb_pack_rows") + " to " + of_bits, packed);
        report(named("vb_pack_rows") + " squares of " + of_bits, squares);
        std::vector<T> unpacked(COLS * DEPTH);
        call("vb_unpack_rows", unpacked.data(), packed.data(), COLS, DEPTH, bits, (int)GROUP,
             (int)(sizeof(T) == 2), 1);
        report(named("vb_unpack_rows") + " from " + of_bits, unpacked);
        const vb::Matrix matrix{packed.data(), bias.data(), COLS, DEPTH, DEPTH, bits, GROUP, 0};
        call(named("vb_multiply").c_str(), out.data(), x.data(), ROWS, DEPTH, &matrix, 1, COLS, 0, 1);
        report(named("vb_multiply") + " by " + of_bits, out);
    }
}

// 4-bit codes that stand for numbers of a table, or are in blocks.
template <typename T> static void tables_and_blocks() {
    constexpr int64_t ROWS = 3, DEPTH = 512;
    constexpr int BITS = 4, NF4 = 256 * 4, Q4_K = 256 * 8, CENTERED = 256 * 9, NVFP4 = 256 * 14;
    for (const int encoding : {NF4, CENTERED, Q4_K, NVFP4}) {
        const bool in_blocks = encoding == Q4_K || encoding == NVFP4;
        const int64_t group = in_blocks ? 256 : 64, heads = DEPTH / group;
        const int64_t stride = in_blocks ? heads * (encoding == Q4_K ? 144 : 148) : DEPTH / 2 + 4 * heads;
        std::vector<uint8_t> packed(ROWS * stride);
        uint32_t seed = 11;
        for (uint8_t &byte : packed) seed = seed * 1664525 + 1013904223, byte = (uint8_t)(seed >> 24);
        const auto scales = numbers<float>(ROWS * heads, 12);
        for (int64_t i = 0; i < ROWS * heads; i++) {
            uint8_t *row = &packed[i / heads * stride], *block = row + i % heads * (stride / heads);
            uint32_t head;
            std::memcpy(&head, &scales[i], sizeof head);
            if (encoding == Q4_K) head = (head & 0x03ff03ff) | 0x2c002800;  // half floats
            if (encoding == NVFP4)
                for (int j = 4; j < 20; j++) block[j] &= 0x77;  // no NaN
            std::memcpy(in_blocks ? block : row + DEPTH / 2 + 4 * (i % heads), &head, sizeof head);
        }
        std::vector<T> out(ROWS * DEPTH);
        call("vb_unpack_rows", out.data(), packed.data(), ROWS, DEPTH, encoding + BITS, (int)group,
             (int)(sizeof(T) == 2), 1);
        report(Names<T>()("vb_unpack_rows") + " of encoding " + std::to_string(encoding / 256), out);
    }
}

// As vb::Norm of elementwise.h, which needs OpenMP.
struct Norm {
    const void *weight;
    int64_t width;
    float eps;
    int32_t kind;
    const void *bias;
};

template <typename T> static void elementwise() {
    const Names<T> named;
    constexpr int64_t ROWS = 3, WIDTH = 100;
    const auto x = numbers<T>(ROWS * WIDTH, 4), weight = numbers<T>(WIDTH, 5), up = numbers<T>(ROWS * WIDTH, 6);
    std::vector<T> out(ROWS * WIDTH);
    for (int kind = 1; kind <= 6; kind++) {
        const void *const bias = kind >= 5 ? up.data() : nullptr;
        const Norm norm{weight.data(), WIDTH, 1e-6f, kind, bias};
        call(named("vb_norm").c_str(), out.data(), x.data(), &norm, ROWS, 1);
        report(named("vb_norm") + " " + std::to_string(kind), out);
    }
    for (int activation = 0; activation <= 7; activation++) {
        call(named("vb_activate").c_str(), out.data(), x.data(), up.data(), ROWS * WIDTH, activation, 1);
        report(named("vb_activate") + " " + std::to_string(activation), out);
    }
}

// Two sequences, 3 new tokens behind 20 cached ones and 1 behind 8, over keys of every format.
template <typename T> static void attention() {
    constexpr int64_t TOKENS = 4, HEADS = 4, KV_HEADS = 2, SIZE = 40, BLOCK = 16, BLOCKS = 3;
    constexpr int64_t SLOTS = BLOCKS * BLOCK;
    const auto q = numbers<T>(TOKENS * HEADS * SIZE, 7);
    const auto k = numbers<T>(SLOTS * KV_HEADS * SIZE, 8), v = numbers<T>(SLOTS * KV_HEADS * SIZE, 9);
    const std::vector<int32_t> starts{0, 3, 4}, lengths{23, 9}, tables{2, 0, 1, 1};
    const std::vector<int64_t> strides{KV_HEADS * SIZE, SIZE, KV_HEADS * SIZE, SIZE};
    const auto sinks = numbers<float>(HEADS, 10);
    std::vector<int64_t> slots(SLOTS);
    for (int64_t i = 0; i < SLOTS; i++) slots[i] = i;
    constexpr int IS_BF16 = sizeof(T) == 2, PLAIN = IS_BF16;
    for (const int format : {PLAIN, 8, 4}) {
        std::vector<uint8_t> keys(SLOTS * KV_HEADS * SIZE * 4), values(keys);
        if (format == PLAIN) {
            std::memcpy(keys.data(), k.data(), k.size() * sizeof(T));
            std::memcpy(values.data(), v.data(), v.size() * sizeof(T));
        } else {
            call("vb_pack_kv", k.data(), v.data(), keys.data(), values.data(), slots.data(), SLOTS, KV_HEADS,
                 BLOCK, SIZE, SIZE, strides.data(), IS_BF16, format, 1);
        }
        std::vector<T> out(TOKENS * HEADS * SIZE);
        call("vb_attention", q.data(), out.data(), keys.data(), values.data(), starts.data(), lengths.data(),
             tables.data(), (int64_t)2, (int64_t)2, HEADS * SIZE, SIZE, HEADS, KV_HEADS, SIZE, SIZE, BLOCK,
             (int64_t)0, (int64_t)0, IS_BF16, format, 0.158f, 30.0f, sinks.data(), (int64_t)0,
             (const float *)nullptr, (const void *)nullptr, (int64_t)0, 1);
        report(Names<T>()("vb_attention") + " over " + std::to_string(format), out);
    }
}

static void noise() {
    std::vector<float> out(10'000);
    call("vb_gumbel", (uint64_t)0x1234567890abcdef, (uint32_t)3, (uint32_t)41, (int64_t)out.size(), out.data());
    report("vb_gumbel", out);
}

int main(int, char **arguments) {
    library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return std::printf("%s\n", dlerror()), 1;
    for (const int64_t rows : {1, 5, 30})
        for (const float scale : {1.0f, 0x1p-126f}) products<float>(rows, scale), products<bf16>(rows, scale);
    tables_and_blocks<float>(), tables_and_blocks<bf16>();
    elementwise<float>(), elementwise<bf16>();
    attention<float>(), attention<bf16>();
    noise();
}
