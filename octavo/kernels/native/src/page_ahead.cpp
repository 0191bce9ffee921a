#include "page_ahead.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>

namespace octavo {
namespace {

constexpr size_t kAhead = size_t{128} << 20, kPiece = size_t{2} << 20;
#ifdef MADV_POPULATE_WRITE
constexpr int kPopulate = MADV_POPULATE_WRITE;
#else
constexpr int kPopulate = 23;  // of Linux 5.14; headers may be older than the kernel
#endif

}  // namespace

void PageAhead::start(uint8_t* memory, size_t bytes) {
    memory_ = memory;
    bytes_ = bytes;
    thread_ = std::thread([this] { work(); });
    used(0);
}

void PageAhead::used(size_t bytes) {
    size_t wish = std::min(bytes + kAhead, bytes_);
    if (wish < asked_ + kPiece) return;
    asked_ = wish;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        wanted_ = wish;
    }
    change_.notify_one();
}

void PageAhead::work() {
    sched_param lowest{};
    sched_setscheduler(0, SCHED_IDLE, &lowest);
    // Whole pages of the pool only. Some at a time: what holds on to the address space must be short.
    uintptr_t start = reinterpret_cast<uintptr_t>(memory_), at = (start + kPiece - 1) / kPiece * kPiece;
    for (std::unique_lock<std::mutex> lock(mutex_);;) {
        change_.wait(lock, [&] { return stop_ || at + kPiece <= start + wanted_; });
        if (stop_) return;
        lock.unlock();
        if (madvise(reinterpret_cast<void*>(at), kPiece, kPopulate) != 0) return;  // an old kernel, or no memory left
        at += kPiece;
        lock.lock();
    }
}

PageAhead::~PageAhead() {
    if (!thread_.joinable()) return;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    change_.notify_one();
    thread_.join();
}

}  // namespace octavo
