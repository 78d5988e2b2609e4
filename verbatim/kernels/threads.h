// Work shared by several threads, and a team of threads that stays awake between pieces of work.
//
// A layer is a dozen short pieces of work. OpenMP takes a microsecond to begin and end one, and ten if its
// threads sleep in between; a team takes a third of a microsecond.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <omp.h>
#include <thread>

namespace vb {

class Team {
  public:
    // Set in the thread that hands out work to a team; null in all others.
    static inline thread_local Team *mine = nullptr;

    explicit Team(int size) : size(size) {}

    // Calls f(thread) for each of `threads`; the team may be smaller. The caller is a member.
    template <typename F> void run(int threads, F &f) {
        call = [](void *f, int thread) { (*(F *)f)(thread); };
        context = &f, count = threads;
        left.store(size - 1, std::memory_order_relaxed);
        round.fetch_add(1, std::memory_order_release);
        for (int t = 0; t < threads; t += size) f(t);
        wait<false>([&] { return left.load(std::memory_order_acquire) == 0; });
    }

    // The loop of the other members until `dismiss`.
    void serve(int thread) {
        for (uint32_t seen = 0;; seen++) {
            wait<true>([&] { return round.load(std::memory_order_acquire) != seen; });
            if (!call) return;
            for (int t = thread; t < count; t += size) call(context, t);
            left.fetch_sub(1, std::memory_order_release);
        }
    }

    void dismiss() {
        call = nullptr;
        round.fetch_add(1, std::memory_order_release);
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    const int size;

  private:
    // Pieces follow one another within microseconds; otherwise, another program may need the processor. After
    // some milliseconds, the caller is busy with something else, such as a hook.
    template <bool SLEEPS, typename Done> static void wait(Done done) {
        for (int i = 0; !done(); i++) {
            if (i < 2000) pause();
            else if (!SLEEPS || i < 10000) std::this_thread::yield();
            else std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }
    void (*call)(void *, int) = nullptr;
    void *context = nullptr;
    int count = 0;
    alignas(64) std::atomic<uint32_t> round{0};
    alignas(64) std::atomic<int> left{0};
};

// At most as many threads as there are processors: more would wait for one another.
static inline int threads_at_once(int threads) {
    static const int processors = omp_get_num_procs();
    return std::min(threads, processors);
}

// Calls f(thread) for each of `threads`; there may be fewer threads.
template <typename F> static inline void parallel(int threads, F f) {
    if (threads <= 1) return f(0);
    if (Team *team = Team::mine) return team->run(threads, f);
#pragma omp parallel num_threads(threads_at_once(threads))
    for (int t = omp_get_thread_num(); t < threads; t += omp_get_num_threads()) f(t);
}

// Calls f(i) for all i below `count`, in runs of adjacent ones, one run per thread.
template <typename F> static inline void parallel_for(int64_t count, int threads, F f) {
    threads = (int)std::max<int64_t>(1, std::min<int64_t>(count, threads));
    parallel(threads, [&](int thread) {
        for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; i++) f(i);
    });
}

// Runs pieces 0 to `count`; pieces with adjacent numbers are adjacent in memory. Each thread goes through a
// range of its own, so that what it prefetches is what it needs next, and then helps the others. `edge(t,
// threads)` is the beginning of the range of thread t, and the end of that of thread t - 1. `begin(thread)`
// returns the function that runs its pieces: f(n, end), with the end of the range of piece n.
template <typename E, typename F>
static inline void share_out(int64_t count, int threads, E edge, F begin) {
    constexpr int MOST_THREADS = 256;
    struct alignas(64) Range {
        std::atomic<int64_t> next;
        int64_t end;
    };
    threads = (int)std::min<int64_t>(threads, std::min<int64_t>(count, MOST_THREADS));
    if (threads <= 0) return;
    Range ranges[MOST_THREADS];
    for (int t = 0; t < threads; t++) {
        ranges[t].next = edge(t, threads);
        ranges[t].end = edge(t + 1, threads);
    }
    parallel(threads, [&](int me) {
        auto f = begin(me);
        for (int t = 0; t < threads; t++) {
            Range &range = ranges[(me + t) % threads];
            for (int64_t n; (n = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;)
                f(n, range.end);
        }
    });
}

// The same, with ranges of equal length.
template <typename F> static inline void share_out(int64_t count, int threads, F begin) {
    const auto edge = [=](int64_t t, int threads) { return count * t / threads; };
    share_out(count, threads, edge, begin);
}

// The number of threads for a product of so many multiplications and weights. Waking the others costs some
// microseconds, and many more if other programs use the processors; a product that takes no longer runs on
// one thread. `threads` 0 takes OpenMP's number.
static inline int threads_for(int64_t products, int64_t numbers, int threads) {
    if (numbers < (1 << 19) && products < (1 << 22)) return 1;
    return threads > 0 ? threads : omp_get_max_threads();
}

// Calls f(); its calls of `parallel` run on a team of at most `threads` threads.
template <typename F> static inline void with_team(int threads, F f) {
    threads = threads_at_once(threads);
    if (threads <= 1 || Team::mine || omp_in_parallel()) return f();
    Team *shared = nullptr;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        shared = new Team(omp_get_num_threads());
        if (omp_get_thread_num()) shared->serve(omp_get_thread_num());
        else {
            Team::mine = shared;
            f();
            Team::mine = nullptr;
            shared->dismiss();
        }
    }
    delete shared;
}

}  // namespace vb
