// Memory pages of the KV pool, asked for before they are needed. The kernel clears a page when it is first written,
// which takes milliseconds for a large page of a virtual machine; a thread of the lowest priority has that done while
// a processor is idle, some way ahead of the blocks in use, so that an engine takes no more memory than it will need.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

namespace octavo {

class PageAhead {
  public:
    PageAhead() = default;
    ~PageAhead();
    PageAhead(const PageAhead&) = delete;
    PageAhead& operator=(const PageAhead&) = delete;

    // `memory` must stay mapped for the life of this object. Once.
    void start(uint8_t* memory, size_t bytes);

    // The first `bytes` are in use now.
    void used(size_t bytes);

  private:
    void work();

    uint8_t* memory_ = nullptr;
    size_t bytes_ = 0, asked_ = 0;  // asked_: only of the thread that calls `used`
    std::mutex mutex_;
    std::condition_variable change_;
    size_t wanted_ = 0;  // guarded, like the next
    bool stop_ = false;
    std::thread thread_;
};

}  // namespace octavo
