// Uninitialized memory that a thread keeps for reuse.
//
// The intermediate results of a layer take 15 MB at 512 rows. Allocating them from the operating system in
// each layer, page by page, took a tenth of a prefill.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace vb {

// A thread's unused pieces of memory.
class Spare {
    struct Piece {
        void *at;
        int64_t bytes;
    };
    std::vector<Piece> pieces;  // the most recently returned one last
    int64_t total = 0;

    Piece remove(size_t i) {
        const Piece piece = pieces[i];
        pieces.erase(pieces.begin() + i);
        total -= piece.bytes;
        return piece;
    }

  public:
    static constexpr int64_t MOST = 64 << 20;  // bytes kept for reuse

    ~Spare() {
        for (const Piece &piece : pieces) std::free(piece.at);
    }

    // Returns a piece of at least `bytes`, and at most twice as many; sets `bytes` to its size.
    void *take(int64_t &bytes) {
        size_t best = pieces.size();
        for (size_t i = pieces.size(); i-- > 0;)
            if (pieces[i].bytes >= bytes && pieces[i].bytes <= 2 * bytes &&
                (best == pieces.size() || pieces[i].bytes < pieces[best].bytes))
                best = i;
        if (best == pieces.size()) return std::aligned_alloc(64, bytes);
        const Piece piece = remove(best);
        bytes = piece.bytes;
        return piece.at;
    }

    void give(void *at, int64_t bytes) {
        if (bytes > MOST) return std::free(at);
        while (total + bytes > MOST) std::free(remove(0).at);
        pieces.push_back({at, bytes});
        total += bytes;
    }

    static Spare &mine() {
        static thread_local Spare spare;
        return spare;
    }
};

// A buffer of `count` uninitialized values, aligned to cache lines.
template <typename T> struct Scratch {
    int64_t bytes;
    T *data;
    explicit Scratch(int64_t count)
        : bytes((count * (int64_t)sizeof(T) + 127) / 64 * 64), data((T *)Spare::mine().take(bytes)) {}
    ~Scratch() { Spare::mine().give(data, bytes); }
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
};

}  // namespace vb
