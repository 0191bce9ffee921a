#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace octavo {
namespace {

// About 30 microseconds: longer than a thread waits for another one's share of a product, and than most of what
// happens between two steps; short against a scheduler's time slice.
constexpr int kSpins = 1000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads), cursors_(static_cast<size_t>(threads_)) {
    for (int t = 1; t < threads_; t++) workers_.emplace_back([this, t] { worker(t); });
}

Pool::~Pool() {
    stop_ = true;
    job_.fetch_add(1, std::memory_order_release);
    wake(job_);
    for (std::thread& t : workers_) t.join();
}

void Pool::run(void (*work)(void*, int), void* context) {
    work_ = work;
    context_ = context;
    reset();
    job_.fetch_add(1, std::memory_order_release);
    wake(job_);
    work(context, 0);
    barrier();
}

void Pool::worker(int thread) {
    for (uint32_t job = 0;;) {
        wait_for_change(job_, job);
        job++;
        if (stop_) return;
        work_(context_, thread);
        barrier();
    }
}

void Pool::barrier() {
    if (threads_ == 1) {
        reset();
        return;
    }
    uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads_)) {
        arrived_.store(0, std::memory_order_relaxed);
        reset();
        phase_.fetch_add(1, std::memory_order_release);
        wake(phase_);
    } else {
        wait_for_change(phase_, phase);
    }
}

void Pool::reset() {
    for (Cursor& c : cursors_) c.taken.store(0, std::memory_order_relaxed);
}

bool Pool::take(int n, int grain, int thread, Range* range) {
    for (int i = 0; i < threads_; i++) {
        int owner = (thread + i) % threads_, begin = share(n, owner), end = share(n, owner + 1);
        int at = begin + cursors_[static_cast<size_t>(owner)].taken.fetch_add(grain, std::memory_order_relaxed);
        if (at >= end) continue;
        *range = {at, at + grain < end ? at + grain : end, end};
        return true;
    }
    return false;
}

void Pool::wait_for_change(std::atomic<uint32_t>& word, uint32_t old) {
    for (int i = 0; i < kSpins; i++) {
        if (word.load(std::memory_order_acquire) != old) return;
        relax();
    }
    // Sequentially consistent with `wake`: either it sees the sleeper, or the sleeper sees the new word.
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (word.load(std::memory_order_seq_cst) == old)
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void Pool::wake(std::atomic<uint32_t>& word) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst))
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}

}  // namespace octavo
