// Threads with pread and pwrite, which every system allows.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "zerotrain/io_engine.hpp"
#include "zerotrain/signals.hpp"

namespace zerotrain {
namespace {

constexpr unsigned kMaxThreads = 8;  // enough for 1 MiB requests; more cost stacks and switches

class ThreadEngine final : public Engine {
 public:
  explicit ThreadEngine(unsigned depth) {
    const unsigned wanted = std::max(1u, std::min(depth, kMaxThreads));
    const SignalsBlocked blocked;
    try {
      for (unsigned i = 0; i < wanted; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;  // fewer threads are slower, none is an error
    }
  }
  ~ThreadEngine() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    work_ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void submit(const std::vector<Request*>& requests, std::vector<Completion>&) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.insert(queue_.end(), requests.begin(), requests.end());
    }
    work_ready_.notify_all();
  }

  void wait() override {
    std::unique_lock<std::mutex> lock(mutex_);
    result_ready_.wait(lock, [this] { return !results_.empty(); });
  }

  void reap(std::vector<Completion>& completed) override {
    std::lock_guard<std::mutex> lock(mutex_);
    completed.insert(completed.end(), results_.begin(), results_.end());
    results_.clear();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      work_ready_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Request* request = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const auto offset = static_cast<off_t>(request->next_offset());
      const ssize_t count = request->is_write ? pwrite(request->fd, request->next_data(), request->next_size(), offset)
                                              : pread(request->fd, request->next_data(), request->next_size(), offset);
      const std::int64_t result = count < 0 ? -errno : count;
      lock.lock();
      results_.push_back({request, result});
      result_ready_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_ready_, result_ready_;
  std::deque<Request*> queue_;
  std::vector<Completion> results_;
  std::vector<std::thread> threads_;
  bool stopping_ = false;
};

}  // namespace

std::unique_ptr<Engine> make_thread_engine(unsigned depth) { return std::make_unique<ThreadEngine>(depth); }

}  // namespace zerotrain
