// Exchange of tensors between the processes of one machine, through shared memory.
//
// The memory begins with a 64-byte line per process, which holds its counter, followed by two slots per
// process. In turn t a process writes its slot t % 2, sets its counter to t, waits for the counters of the
// others, and copies what they have written. It reuses the slot in turn t + 2, after all counters have
// reached t + 1: each process sets its counter to t + 1 only after it has copied the data of turn t.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "threads.h"

namespace {

constexpr int64_t LINE = 64;
constexpr int64_t PAGE = 4096;
using Counter = std::atomic<uint32_t>;

static Counter &counter_of(char *area, int64_t process) {
    return *reinterpret_cast<Counter *>(area + process * LINE);
}

// Waits until a counter differs from `seen`, for at most `milliseconds`.
static void sleep(Counter &counter, uint32_t seen, int64_t milliseconds) {
    timespec most{0, (long)milliseconds * 1000000};
    syscall(SYS_futex, &counter, FUTEX_WAIT, seen, &most, nullptr, 0);
}

static void wake(Counter &counter) {
    syscall(SYS_futex, &counter, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace

// Writes own[rows, spans[process].width] to this process's slot, unless it is null (an earlier call of this
// turn has written it), and copies the parts of all processes to out[rows, stride], each at its
// spans[].begin, unless `out` is null. `spans` are in bytes. Spins `spins` times before it sleeps. Returns
// the number of a process that has not arrived after about `milliseconds`, or -1.
extern "C" int vb_exchange(char *area, int64_t slot_bytes, int64_t process, int64_t size,
                           uint32_t turn, const char *own, char *out, int64_t rows, int64_t stride,
                           const int64_t *spans, int64_t spins, int64_t milliseconds) {
    char *slots = area + (size * LINE + PAGE - 1) / PAGE * PAGE + turn % 2 * size * slot_bytes;
    if (own) {
        std::memcpy(slots + process * slot_bytes, own, rows * spans[2 * process + 1]);
        counter_of(area, process).store(turn, std::memory_order_release);
        wake(counter_of(area, process));
    }
    for (int64_t other = 0; other < size; other++) {
        Counter &counter = counter_of(area, other);
        bool has_slept = false;
        for (int64_t i = 0;; i++) {
            const uint32_t seen = counter.load(std::memory_order_acquire);
            if ((int32_t)(seen - turn) >= 0) break;
            if (has_slept) return (int)other;
            if (i < spins) vb::Team::pause();
            else sleep(counter, seen, milliseconds), has_slept = true;
        }
        if (!out) continue;
        const int64_t begin = spans[2 * other], width = spans[2 * other + 1];
        for (int64_t r = 0; r < rows; r++)
            std::memcpy(out + r * stride + begin, slots + other * slot_bytes + r * width, width);
    }
    return -1;
}
