// A scratch file without a name, spread over one or more folders, read and written asynchronously.
//
// spill/file.py makes the folders and checks the limits before any allocation here. Offsets are those of the whole
// file; with several folders its stripes are distributed round-robin. All methods may be called from any thread of
// the process that made the file; a forked child must not call them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "zerotrain/io_engine.hpp"

namespace zerotrain {

// A read or write that failed: the system's error number and the offset in the spill file.
class TransferError : public std::runtime_error {
 public:
  TransferError(int error, std::uint64_t offset, const std::string& message)
      : std::runtime_error(message), error(error), offset(offset) {}
  int error;
  std::uint64_t offset;
};

// One device's part of a transfer.
struct Part {
  std::size_t remaining = 0;  // requests that have not ended
  int error = 0;
  std::uint64_t error_offset = 0;
  bool at_end = false;  // the file ended there
  bool is_write = false;
  std::deque<Request> requests;

  void fail(int number, std::uint64_t offset, bool file_ended);
};

// One folder's file and its queue.
class Device {
 public:
  Device(const std::string& folder, unsigned depth);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void use(std::unique_ptr<Engine> engine);
  void probe();             // a real write and read at the file's start; throws std::system_error
  void resize(std::uint64_t from, std::uint64_t to);
  void cut(std::uint64_t size);  // releases the space that a resize has taken
  void start(Part& part);   // its requests are in the queue from here on
  void wait(Part& part);    // until none of them is in flight
  void drain();             // until no request is in flight
  int fd() const { return fd_; }

  static constexpr const char* kUnnamed = "O_TMPFILE";
  std::string unlinked_by = kUnnamed, direct_reason, allocation_reason;
  bool is_direct = true;

 private:
  void open_file(const std::string& folder);
  void open_buffered(const std::string& folder);
  void try_direct(const std::string& folder);
  void reap_one(std::unique_lock<std::mutex>& lock);
  void collect();
  void pump();
  void finish(const Completion& completion);

  int fd_ = -1;
  const unsigned depth_;
  std::unique_ptr<Engine> engine_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request*> pending_;
  std::vector<Request*> batch_;
  std::vector<Completion> completions_;
  unsigned in_flight_ = 0;
  bool reaping_ = false;  // a thread waits in the kernel; the others wait for it
};

struct SpillOptions {
  std::string engine;  // "auto", "io_uring", "libaio" or "threads"
  unsigned queue_depth;
  std::size_t request_bytes;
  std::size_t stripe_bytes;
};

// A read or write of any length, over all devices.
struct Transfer {
  std::vector<Part> parts;
};

class SpillFile {
 public:
  SpillFile(const std::vector<std::string>& folders, std::uint64_t size, const SpillOptions& options);
  ~SpillFile();

  // The memory must live until wait() has returned. Offset, size and address are multiples of kPage.
  std::unique_ptr<Transfer> start(bool is_write, std::uint64_t offset, char* data, std::size_t size);
  // Throws TransferError once no request of the transfer is in flight. Any other error means that waiting failed: the
  // transfer and its memory must then stay until close().
  void wait(Transfer& transfer);
  void resize(std::uint64_t size);
  void drain();  // until no request is in flight; throws std::system_error if that cannot be known
  bool is_owner() const;  // false in a forked child

  std::uint64_t size() const { return size_; }
  const Device& device(std::size_t i) const { return *devices_.at(i); }
  std::size_t num_devices() const { return devices_.size(); }
  std::string engine, engine_reason;
  std::atomic<std::uint64_t> bytes_read{0}, bytes_written{0};

 private:
  void choose_engine();
  void check(std::uint64_t offset, const char* data, std::size_t size) const;
  std::uint64_t share(std::size_t device, std::uint64_t size) const;

  SpillOptions options_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::atomic<std::uint64_t> size_{0};
  pid_t owner_;
};

}  // namespace zerotrain
