// The native module's own threads: made once, asleep between calls, and free to run where the process was when
// the module was loaded (not where an OpenMP runtime bound the calling thread since).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace zerotrain {

class ThreadPool {
 public:
  // The process's pool. After a fork the child gets a new one at its first call.
  static ThreadPool& shared();

  ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls `work(block)` for every block in [0, blocks), each once, in any order, and returns when all are done.
  // The caller works too, so calls from several threads and from inside `work` cannot wait for each other.
  // `threads`: how many take part, the caller included; 0: as many as the process may use (`size()`).
  // More than the system lets it start is no error. Rethrows the first exception of `work`; blocks that nobody
  // has begun by then are left out. Holds no Python lock: release the GIL before.
  void run(std::size_t blocks, const std::function<void(std::size_t)>& work, std::size_t threads = 0);

  // Threads that run() uses by default; see cpu_budget.hpp.
  std::size_t size() const;

 private:
  ~ThreadPool() = delete;  // its threads sleep until the process ends
  struct State;
  State* state_;
};

}  // namespace zerotrain
