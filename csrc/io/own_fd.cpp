// The list of the process's own descriptors, and their closing at fork().
#include "own_fd.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

namespace zerotrain {
namespace {

struct Owned {
  std::mutex mutex;
  std::vector<int> fds;
};

// Never destroyed: a fork may happen while the process ends.
Owned& owned() {
  static Owned* const all = new Owned;
  return *all;
}

void before_fork() { owned().mutex.lock(); }
void after_fork_in_parent() { owned().mutex.unlock(); }
void after_fork_in_child() {
  for (const int fd : owned().fds) close(fd);
  owned().fds.clear();
  owned().mutex.unlock();
}
[[maybe_unused]] const int registered = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

}  // namespace

int open_own(const std::function<int()>& open) {
  const std::lock_guard<std::mutex> lock(owned().mutex);
  owned().fds.reserve(owned().fds.size() + 1);
  const int fd = open();
  if (fd >= 0) owned().fds.push_back(fd);
  return fd;
}

void close_own(int fd) {
  const std::lock_guard<std::mutex> lock(owned().mutex);
  auto& fds = owned().fds;
  const auto found = std::find(fds.begin(), fds.end(), fd);
  // Missing here: a forked child has closed it, and the number may be another file's by now.
  if (found == fds.end()) return;
  fds.erase(found);
  close(fd);
}

}  // namespace zerotrain
