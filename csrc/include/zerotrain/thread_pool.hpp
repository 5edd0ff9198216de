// The native module's own threads: created once and asleep between calls. They may run on the cores that the process
// had when the module was loaded (not only on those to which an OpenMP runtime bound the calling thread since).
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

  // Calls `work(block)` for every block in [0, blocks), each once, in any order, and returns when all are done. The
  // caller works too, so calls from several threads and from inside `work` cannot wait for each other. `threads` is
  // the number of participating threads, the caller included; 0 means as many as the process may use (`size()`). It
  // is no error if the system lets the process start fewer. Rethrows the first exception of `work`; blocks that have
  // not begun by then are left out. Holds no Python lock: release the GIL before.
  void run(std::size_t blocks, const std::function<void(std::size_t)>& work, std::size_t threads = 0);

  // Threads that run() uses by default; see cpu_budget.hpp.
  std::size_t size() const;

 private:
  ~ThreadPool() = delete;  // its threads sleep until the process ends
  struct State;
  State* state_;
};

}  // namespace zerotrain
