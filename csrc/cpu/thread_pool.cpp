#include "zerotrain/thread_pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "zerotrain/cpu_budget.hpp"
#include "zerotrain/signals.hpp"

namespace zerotrain {
namespace {

// The cores on which the process could run when the module was loaded.
struct Cores {
  cpu_set_t set;
  bool known;
  Cores() : known(sched_getaffinity(0, sizeof set, &set) == 0) {}
};
const Cores cores_at_load;

// One call of run(). It is on the caller's stack: the caller returns once no worker is inside any more.
struct Job {
  const std::function<void(std::size_t)>& work;
  const std::size_t blocks;
  std::size_t places;  // for workers that have not joined; guarded by the pool's mutex, as are the next two
  std::size_t inside = 0;
  std::exception_ptr error;
  std::atomic<std::size_t> next{0};

  Job(const std::function<void(std::size_t)>& given, std::size_t num_blocks, std::size_t num_workers)
      : work(given), blocks(num_blocks), places(num_workers) {}

  bool has_work() const { return next.load(std::memory_order_relaxed) < blocks; }
};

std::atomic<ThreadPool*> shared_pool{nullptr};

// The parent's threads do not exist in a child, and may hold its mutexes.
void forget_in_child() { shared_pool.store(nullptr); }
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);

}  // namespace

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable came;  // signals a new job
  std::condition_variable left;  // signals that the last worker of a job has left
  std::deque<Job*> jobs;         // jobs that have places
  std::size_t workers = 0;
  const std::size_t size = num_usable_threads();

  // Run blocks of one job until none is left. The first exception ends the job.
  void take_part(Job& job) {
    try {
      for (std::size_t block = job.next++; block < job.blocks; block = job.next++) job.work(block);
    } catch (...) {
      job.next.store(job.blocks);
      const std::lock_guard<std::mutex> lock(mutex);
      if (!job.error) job.error = std::current_exception();
    }
  }

  void leave_queue(Job& job) {
    const auto at = std::find(jobs.begin(), jobs.end(), &job);
    if (at != jobs.end()) jobs.erase(at);
  }

  void work_forever() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      came.wait(lock, [&] { return !jobs.empty(); });
      Job& job = *jobs.front();
      if (--job.places == 0 || !job.has_work()) leave_queue(job);
      ++job.inside;
      lock.unlock();
      take_part(job);
      lock.lock();
      if (--job.inside == 0) left.notify_all();
    }
  }

  // If the system refuses a thread, the running ones do its blocks as well.
  void grow_to(std::size_t wanted) {
    if (workers >= wanted) return;
    const SignalsBlocked blocked;
    try {
      for (; workers < wanted; ++workers) {
        std::thread made([this] { work_forever(); });
        if (cores_at_load.known) {
          pthread_setaffinity_np(made.native_handle(), sizeof cores_at_load.set, &cores_at_load.set);
        }
        made.detach();
      }
    } catch (const std::system_error&) {
    }
  }
};

ThreadPool::ThreadPool() : state_(new State) {}

ThreadPool& ThreadPool::shared() {
  ThreadPool* pool = shared_pool.load(std::memory_order_acquire);
  if (pool) return *pool;
  auto* made = new ThreadPool;
  // The second of two racing callers leaks its own pool, which has no threads yet: a few hundred bytes, once.
  return shared_pool.compare_exchange_strong(pool, made) ? *made : *pool;
}

std::size_t ThreadPool::size() const { return state_->size; }

void ThreadPool::run(std::size_t blocks, const std::function<void(std::size_t)>& work, std::size_t threads) {
  const std::size_t wanted = std::min(threads ? threads : state_->size, blocks);
  Job job(work, blocks, wanted ? wanted - 1 : 0);
  if (job.places) {
    {
      const std::lock_guard<std::mutex> lock(state_->mutex);
      state_->grow_to(job.places);
      state_->jobs.push_back(&job);
    }
    wanted == 2 ? state_->came.notify_one() : state_->came.notify_all();
  }
  state_->take_part(job);
  {
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->leave_queue(job);
    state_->left.wait(lock, [&] { return job.inside == 0; });
  }
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace zerotrain
