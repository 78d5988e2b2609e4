// Work that several threads share, and a team of them that stays awake from one piece to the next.
//
// A layer is a dozen short pieces. OpenMP takes a microsecond to begin and end one, ten where its
// threads sleep in between; a team takes a third of one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <omp.h>
#include <thread>

namespace vb {

class Team {
  public:
    // Of the thread that hands out its pieces, while it does; null for all others.
    static inline thread_local Team *mine = nullptr;

    explicit Team(int size) : size(size) {}

    // f(thread) on the first `threads` of the team, of which the caller is one.
    template <typename F> void run(int threads, F &f) {
        call = [](void *f, int thread) { (*(F *)f)(thread); };
        context = &f, count = threads;
        left.store(size - 1, std::memory_order_relaxed);
        round.fetch_add(1, std::memory_order_release);
        f(0);
        wait([&] { return left.load(std::memory_order_acquire) == 0; });
    }

    // What the others do until `dismiss`.
    void serve(int thread) {
        for (uint32_t seen = 0;; seen++) {
            wait([&] { return round.load(std::memory_order_acquire) != seen; });
            if (!call) return;
            if (thread < count) call(context, thread);
            left.fetch_sub(1, std::memory_order_release);
        }
    }

    void dismiss() {
        call = nullptr;
        round.fetch_add(1, std::memory_order_release);
    }

    const int size;

  private:
    // Pieces follow one another within microseconds. Where they don't, somebody else wants the processor.
    template <typename Done> static void wait(Done done) {
        for (int i = 0; !done(); i++) {
            if (i > 2000) std::this_thread::yield();
            else pause();
        }
    }
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    void (*call)(void *, int) = nullptr;
    void *context = nullptr;
    int count = 0;
    alignas(64) std::atomic<uint32_t> round{0};
    alignas(64) std::atomic<int> left{0};
};

// f(thread) for each of `threads` threads.
template <typename F> static inline void parallel(int threads, F f) {
    if (threads <= 1) return f(0);
    if (Team *team = Team::mine; team && team->size >= threads) return team->run(threads, f);
#pragma omp parallel num_threads(threads)
    for (int t = omp_get_thread_num(); t < threads; t += omp_get_num_threads()) f(t);  // there may be fewer
}

// f(i) for all i below `count`, in runs of neighbours, one for each thread.
template <typename F> static inline void parallel_for(int64_t count, int threads, F f) {
    threads = (int)std::max<int64_t>(1, std::min<int64_t>(count, threads));
    parallel(threads, [&](int thread) {
        for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; i++) f(i);
    });
}

// f(), whose `parallel` pieces of at most `threads` threads go to a team.
template <typename F> static inline void with_team(int threads, F f) {
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
