// Conversion of quantized matrices to the layout of integer products (integer_tile.h): rows packed by
// verbatim/quantization/matrix.py become blocks of 32 columns. No value changes.

#include <omp.h>

#include "packed.h"
#include "threads.h"

namespace {

constexpr int64_t COLS = 32;
constexpr uint32_t LOW = 0x0f0f0f0f;

static inline uint32_t word_at(const uint8_t *p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// Writes the words of a group of `size` codes, which may be short; the words are `COLS` apart.
static void short_group_words(uint32_t *to, const uint8_t *codes, int size, int bits) {
    const int per_word = 32 / bits, half = (size + 1) / 2;
    for (int k = 0; k < size; k++) {
        const int code = bits == 8 ? codes[k] : k < half ? codes[k] & 15 : codes[k - half] >> 4;
        const int place = k % per_word;
        to[k / per_word * COLS] |= (uint32_t)code << (8 * (place % 4) + 4 * (place / 4));
    }
}

static inline void whole_group_words(uint32_t *to, const uint8_t *codes, int size, int bits) {
    if (bits == 8) {
        for (int i = 0; i < size / 4; i++) to[i * COLS] = word_at(codes + 4 * i);
        return;
    }
    const int words = size / 16;  // of each half
    for (int i = 0; i < words; i++) {
        const uint32_t a = word_at(codes + 8 * i), b = word_at(codes + 8 * i + 4);
        to[i * COLS] = (a & LOW) | (b & LOW) << 4;
        to[(words + i) * COLS] = (a >> 4 & LOW) | (b & ~LOW);
    }
}

}  // namespace

// out: blocks of words, with zeros for missing columns and codes. `threads` 0 takes OpenMP's number.
extern "C" void vb_interleave(uint32_t *out, const uint8_t *packed, int64_t rows, int64_t depth,
                              int bits, int group, int threads) {
    const RowLayout row(depth, bits, group);
    const int64_t rest_words = (row.rest * bits + 31) / 32, group_words = group * bits / 32;
    const int64_t words = row.whole * (1 + group_words) + (row.rest ? 1 + rest_words : 0);
    const int64_t blocks = (rows + COLS - 1) / COLS;
    if (threads <= 0) threads = omp_get_max_threads();
#pragma omp parallel for schedule(static) num_threads(threads_at_once(threads))
    for (int64_t b = 0; b < blocks; b++) {
        uint32_t *block = out + b * words * COLS;
        const int64_t count = std::min(COLS, rows - b * COLS);
        if (count < COLS || row.rest) std::memset(block, 0, words * COLS * 4);
        for (int64_t c = 0; c < count; c++) {
            const uint8_t *codes = packed + (b * COLS + c) * row.bytes;
            const uint8_t *heads = codes + row.code_bytes;
            uint32_t *to = block + c;
            for (int64_t g = 0; g < row.whole; g++, heads += 4, codes += group * bits / 8) {
                *to = word_at(heads);
                whole_group_words(to + COLS, codes, group, bits);
                to += (1 + group_words) * COLS;
            }
            if (row.rest) {
                *to = word_at(heads);
                short_group_words(to + COLS, codes, row.rest, bits);
            }
        }
    }
}
