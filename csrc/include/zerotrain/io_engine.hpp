// Ways to submit requests to the kernel: io_uring, libaio, or threads with pread and pwrite. One engine per device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace zerotrain {

struct Part;  // of a transfer; see spill_file.hpp

// One contiguous read or write, resubmitted until it is done.
struct Request {
  int fd = -1;
  bool is_write = false;
  char* data = nullptr;
  std::size_t size = 0;
  std::uint64_t offset = 0;   // in the device's file
  std::uint64_t logical = 0;  // in the spill file, for messages
  std::size_t done = 0;
  int tries = 0;
  Part* part = nullptr;

  char* next_data() const { return data + done; }
  std::size_t next_size() const { return size - done; }
  std::uint64_t next_offset() const { return offset + done; }
};

struct Completion {
  Request* request;
  std::int64_t result;  // bytes moved, or -errno
};

// submit and reap are called under the device's lock; wait is called without it, by one thread at a time, and only
// while requests are in flight. No more than `depth` requests are in flight.
class Engine {
 public:
  virtual ~Engine() = default;
  // Requests that the kernel refuses at once are appended to `refused`.
  virtual void submit(const std::vector<Request*>& requests, std::vector<Completion>& refused) = 0;
  virtual void wait() = 0;
  virtual void reap(std::vector<Completion>& completed) = 0;
};

// Each function throws std::system_error, naming the call, if the system refuses it.
std::unique_ptr<Engine> make_uring_engine(unsigned depth);
std::unique_ptr<Engine> make_libaio_engine(unsigned depth);
std::unique_ptr<Engine> make_thread_engine(unsigned depth);

}  // namespace zerotrain
