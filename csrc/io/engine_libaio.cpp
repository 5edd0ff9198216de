// Linux's older asynchronous I/O through its system calls; the libaio library is not needed.
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "zerotrain/io_engine.hpp"

namespace zerotrain {
namespace {

[[noreturn]] void fail(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

class LibaioEngine final : public Engine {
 public:
  explicit LibaioEngine(unsigned depth) : events_(depth) {
    if (syscall(__NR_io_setup, depth, &context_) < 0) fail(errno, "io_setup");
  }
  ~LibaioEngine() override { syscall(__NR_io_destroy, context_); }

  void submit(const std::vector<Request*>& requests, std::vector<Completion>& refused) override {
    std::vector<iocb> blocks(requests.size());
    std::vector<iocb*> pointers;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const Request& request = *requests[i];
      iocb& block = blocks[i];
      block.aio_data = reinterpret_cast<std::uint64_t>(requests[i]);
      block.aio_lio_opcode = request.is_write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
      block.aio_fildes = static_cast<std::uint32_t>(request.fd);
      block.aio_buf = reinterpret_cast<std::uint64_t>(request.next_data());
      block.aio_nbytes = request.next_size();
      block.aio_offset = static_cast<std::int64_t>(request.next_offset());
      pointers.push_back(&block);
    }
    std::size_t taken = 0;
    int tries = 0;
    while (taken < requests.size()) {
      const long count = syscall(__NR_io_submit, context_, requests.size() - taken, pointers.data() + taken);
      if (count > 0) {
        taken += static_cast<std::size_t>(count);
        continue;
      }
      const int error = count < 0 ? errno : EAGAIN;
      if (error == EINTR) continue;
      if (error == EAGAIN && ++tries < 1000) {
        usleep(1000);
        continue;
      }
      refused.push_back({requests[taken++], -error});  // the error is the first one's; the others are submitted later
    }
  }

  void wait() override {
    while (ready_ == 0) {
      const int error = take(1, nullptr);
      if (error) fail(error, "io_getevents");
    }
  }

  void reap(std::vector<Completion>& completed) override {
    timespec now{};
    do {
      // An error is for the waiting thread to report: thrown here it would lose what was taken before.
      if (ready_ == 0 && take(0, &now) != 0) break;
      for (std::size_t i = 0; i < ready_; ++i) {
        completed.push_back({reinterpret_cast<Request*>(events_[i].data), events_[i].res});
      }
      if (ready_ == 0) break;
      ready_ = 0;
    } while (true);
  }

 private:
  // Returns the system's error number, or 0.
  int take(long at_least, timespec* timeout) {
    const long count = syscall(__NR_io_getevents, context_, at_least, events_.size(), events_.data(), timeout);
    if (count < 0) return errno == EINTR ? 0 : errno;
    ready_ = static_cast<std::size_t>(count);
    return 0;
  }

  aio_context_t context_ = 0;
  std::vector<io_event> events_;
  std::size_t ready_ = 0;  // events taken and not yet reaped
};

}  // namespace

std::unique_ptr<Engine> make_libaio_engine(unsigned depth) { return std::make_unique<LibaioEngine>(depth); }

}  // namespace zerotrain
