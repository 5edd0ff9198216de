// io_uring through its three system calls; liburing is not needed.
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "own_fd.hpp"
#include "zerotrain/io_engine.hpp"

namespace zerotrain {
namespace {

[[noreturn]] void fail(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

class Mapping {
 public:
  Mapping(int fd, std::size_t size, std::uint64_t offset) : size_(size) {
    data_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
    if (data_ == MAP_FAILED) fail(errno, "mmap of the io_uring ring");
    // A forked child must not use the ring, and its copy would keep the ring alive.
    (void)madvise(data_, size, MADV_DONTFORK);
  }
  ~Mapping() { munmap(data_, size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + offset);
  }

 private:
  void* data_;
  std::size_t size_;
};

class RingFd {
 public:
  RingFd(unsigned depth, io_uring_params& params) {
    params.flags = IORING_SETUP_CLAMP;
    fd_ = open_own([&] { return static_cast<int>(syscall(__NR_io_uring_setup, depth, &params)); });
    if (fd_ < 0) fail(errno, "io_uring_setup");
  }
  ~RingFd() { close_own(fd_); }
  RingFd(const RingFd&) = delete;
  RingFd& operator=(const RingFd&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

std::size_t ring_bytes(const io_uring_params& params) {
  const std::size_t submission = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  const std::size_t completion = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  if (!(params.features & IORING_FEAT_SINGLE_MMAP)) fail(ENOSYS, "io_uring older than Linux 5.4");
  return std::max(submission, completion);
}

class UringEngine final : public Engine {
 public:
  explicit UringEngine(unsigned depth)
      : fd_(depth, params_),
        rings_(fd_.get(), ring_bytes(params_), IORING_OFF_SQ_RING),
        entries_(fd_.get(), params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
    if (params_.sq_entries < depth) fail(EINVAL, "io_uring_setup: the queue depth");
  }

  void submit(const std::vector<Request*>& requests, std::vector<Completion>& refused) override {
    auto* tail = rings_.at<unsigned>(params_.sq_off.tail);
    const unsigned mask = *rings_.at<unsigned>(params_.sq_off.ring_mask);
    auto* array = rings_.at<unsigned>(params_.sq_off.array);
    const unsigned start = *tail;
    unsigned position = start;
    for (Request* request : requests) {
      const unsigned index = position++ & mask;
      io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index];
      entry = io_uring_sqe{};
      entry.opcode = request->is_write ? IORING_OP_WRITE : IORING_OP_READ;
      entry.fd = request->fd;
      entry.off = request->next_offset();
      entry.addr = reinterpret_cast<std::uint64_t>(request->next_data());
      entry.len = static_cast<unsigned>(request->next_size());
      entry.user_data = reinterpret_cast<std::uint64_t>(request);
      array[index] = index;
    }
    __atomic_store_n(tail, position, __ATOMIC_RELEASE);
    enter(requests, start, refused);
  }

  void wait() override {
    // An interrupted wait checks the ring as well: the caller waits again while it is empty.
    while (empty()) {
      if (syscall(__NR_io_uring_enter, fd_.get(), 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0 && errno != EINTR &&
          errno != EAGAIN && errno != EBUSY) {
        fail(errno, "io_uring_enter");
      }
    }
  }

  void reap(std::vector<Completion>& completed) override {
    auto* head = rings_.at<unsigned>(params_.cq_off.head);
    const unsigned mask = *rings_.at<unsigned>(params_.cq_off.ring_mask);
    const auto* cqes = rings_.at<io_uring_cqe>(params_.cq_off.cqes);
    unsigned position = *head;
    const unsigned stop = __atomic_load_n(rings_.at<unsigned>(params_.cq_off.tail), __ATOMIC_ACQUIRE);
    for (; position != stop; ++position) {
      const io_uring_cqe& entry = cqes[position & mask];
      completed.push_back({reinterpret_cast<Request*>(entry.user_data), entry.res});
    }
    __atomic_store_n(head, position, __ATOMIC_RELEASE);
  }

 private:
  bool empty() const {
    return *rings_.at<unsigned>(params_.cq_off.head) ==
           __atomic_load_n(rings_.at<unsigned>(params_.cq_off.tail), __ATOMIC_ACQUIRE);
  }

  void enter(const std::vector<Request*>& requests, unsigned start, std::vector<Completion>& refused) {
    std::size_t taken = 0;
    int tries = 0;
    while (taken < requests.size()) {
      const long count = syscall(__NR_io_uring_enter, fd_.get(), requests.size() - taken, 0, 0, nullptr, 0);
      if (count > 0) {
        taken += static_cast<std::size_t>(count);
        continue;
      }
      const int error = count < 0 ? errno : EAGAIN;
      if (error == EINTR) continue;
      // The kernel has no memory for a request now.
      if ((error == EAGAIN || error == EBUSY) && ++tries < 1000) {
        usleep(1000);
        continue;
      }
      // The kernel has not seen these requests: their places in the ring are taken back.
      __atomic_store_n(rings_.at<unsigned>(params_.sq_off.tail), start + static_cast<unsigned>(taken),
                       __ATOMIC_RELEASE);
      for (; taken < requests.size(); ++taken) refused.push_back({requests[taken], -error});
    }
  }

  io_uring_params params_{};
  RingFd fd_;
  Mapping rings_, entries_;
};

}  // namespace

std::unique_ptr<Engine> make_uring_engine(unsigned depth) { return std::make_unique<UringEngine>(depth); }

}  // namespace zerotrain
