// Memory without values, which a thread keeps from one use to the next.
//
// What a layer puts down between its products is 15 MB at 512 rows. Taken from the operating system and given
// back in each layer, page by page, that was a tenth of a prefill.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace vb {

// A thread's pieces that wait for their next use.
class Spare {
    struct Piece {
        void *at;
        int64_t bytes;
    };
    std::vector<Piece> pieces;  // the one that was given back last at the end
    int64_t total = 0;

    Piece remove(size_t i) {
        const Piece piece = pieces[i];
        pieces.erase(pieces.begin() + i);
        total -= piece.bytes;
        return piece;
    }

  public:
    static constexpr int64_t MOST = 64 << 20;  // bytes that wait

    ~Spare() {
        for (const Piece &piece : pieces) std::free(piece.at);
    }

    // A piece of at least `bytes`, and at most twice as many, which `bytes` then tells.
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

// Room for `count` values, aligned to cache lines.
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
