// The engine's own threads. The caller of `run` is thread 0; the others spin for a moment after each job and then
// sleep until the next one, so an idle engine uses no processor time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace octavo {

class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Calls work(context, thread) on all threads and returns when all are done. Not from inside a job.
    void run(void (*work)(void* context, int thread), void* context);

    template <class Work> void run(Work&& work) {
        run([](void* context, int thread) { (*static_cast<Work*>(context))(thread); }, &work);
    }

    // Inside a job: waits until every thread is here. All writes before it are seen after it.
    void barrier();

    // The neighbouring share of 0 <= i < n that a thread begins with.
    int share(int n, int thread) const { return static_cast<int>(static_cast<long>(n) * thread / threads_); }

    // Inside a job: up to `grain` numbers of 0 <= i < n that no thread has taken since the last barrier, of the
    // thread's own share while there are any, then of the others'. False when all are taken.
    struct Range {
        int first, last, share_end;
    };
    bool take(int n, int grain, int thread, Range* range);

  private:
    void worker(int thread);
    void wait_for_change(std::atomic<uint32_t>& word, uint32_t old);
    void wake(std::atomic<uint32_t>& word);
    void reset();

    const int threads_;
    void (*work_)(void*, int) = nullptr;
    void* context_ = nullptr;
    bool stop_ = false;
    alignas(64) std::atomic<uint32_t> job_{0};      // counts jobs
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};    // counts barriers
    alignas(64) std::atomic<uint32_t> sleepers_{0};
    struct alignas(64) Cursor {
        std::atomic<int> taken{0};  // of the thread's share
    };
    std::vector<Cursor> cursors_;
    std::vector<std::thread> workers_;
};

}  // namespace octavo
