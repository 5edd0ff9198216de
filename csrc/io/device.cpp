// One folder's file: opened without a name, allocated, and its queue of requests.
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "own_fd.hpp"
#include "zerotrain/aligned.hpp"
#include "zerotrain/spill_file.hpp"

namespace zerotrain {
namespace {

constexpr int kMaxTries = 1000;  // tries of one request that the kernel defers

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::string because(const char* call, int error) { return std::string(call) + ": " + std::strerror(error); }

std::string random_name() {
  unsigned char bytes[8];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) fail(errno, "getrandom");
  std::string name = "/spill-";
  for (unsigned char byte : bytes) name += "0123456789abcdef"[byte & 15];
  return name;
}

// Without O_DIRECT a write only reaches the page cache, and the drive's error would never be reported.
constexpr int kBuffered = O_DSYNC;

// Below, `flags` is O_DIRECT or kBuffered. Both functions return -1 and set errno.
int open_unnamed(const std::string& folder, int flags) {
  // O_EXCL: the file can never be given a name.
  return open_own([&] { return open(folder.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC | flags, 0600); });
}

int open_named(const std::string& path, int flags) {
  return open_own([&] { return open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC | flags, 0600); });
}

int open_and_unlink(const std::string& folder, int flags) {
  const std::string path = folder + random_name();
  const int fd = open_named(path, flags);
  if (fd < 0) {
    const int error = errno;
    unlink(path.c_str());  // some systems leave the name when they refuse O_DIRECT
    errno = error;
    return -1;
  }
  if (unlink(path.c_str()) < 0) {
    const int error = errno;
    close_own(fd);
    fail(error, "unlink of the new spill file " + path);
  }
  return fd;
}

bool is_refusal_of_kind(int error) { return error == EOPNOTSUPP || error == EISDIR || error == EINVAL || error == ENOSYS; }

}  // namespace

Device::Device(const std::string& folder, unsigned depth) : depth_(depth) {
  open_file(folder);
  try {
    if (is_direct) try_direct(folder);
  } catch (...) {
    close_own(fd_);
    throw;
  }
}

Device::~Device() {
  // The kernel may be writing into buffers until the last request has ended.
  try {
    drain();
  } catch (const std::system_error&) {
    (void)engine_.release();  // a queue that cannot be waited for is left to the end of the process
  }
  engine_.reset();
  close_own(fd_);
}

void Device::open_file(const std::string& folder) {
  int direct_error = 0, unnamed_error = 0;
  fd_ = open_unnamed(folder, O_DIRECT);
  if (fd_ < 0 && is_refusal_of_kind(errno)) {
    unnamed_error = errno;
    fd_ = open_unnamed(folder, kBuffered);
    if (fd_ >= 0) {
      direct_error = unnamed_error;
    } else if (is_refusal_of_kind(errno)) {
      unnamed_error = errno;
      unlinked_by = "O_CREAT|O_EXCL, unlinked before the first write (" + because("O_TMPFILE", unnamed_error) + ")";
      fd_ = open_and_unlink(folder, O_DIRECT);
      if (fd_ < 0 && errno == EINVAL) {
        direct_error = errno;
        fd_ = open_and_unlink(folder, kBuffered);
      }
    }
  }
  if (fd_ < 0) fail(errno, "open of a spill file in " + folder);
  if (direct_error) {
    is_direct = false;
    direct_reason = because("open with O_DIRECT", direct_error);
  }
}

// Some file systems accept the flag and reject the first transfer.
void Device::try_direct(const std::string& folder) {
  AlignedBuffer block(kPage);
  const char* call = "write with O_DIRECT";
  ssize_t moved = pwrite(fd_, block.data(), kPage, 0);
  if (moved == static_cast<ssize_t>(kPage)) {
    call = "read with O_DIRECT";
    moved = pread(fd_, block.data(), kPage, 0);
  }
  if (moved == static_cast<ssize_t>(kPage)) return;
  const int error = moved < 0 ? errno : EIO;
  if (error != EINVAL) fail(error, std::string(call) + " of the spill file");
  is_direct = false;
  direct_reason = because(call, error);
  // A new file, as fcntl cannot set O_DSYNC.
  const int buffered = unlinked_by == kUnnamed ? open_unnamed(folder, kBuffered) : open_and_unlink(folder, kBuffered);
  if (buffered < 0) fail(errno, "open of a spill file in " + folder);
  close_own(fd_);
  fd_ = buffered;
}

void Device::use(std::unique_ptr<Engine> engine) {
  // What the last one could not wait for will not be reported by this one.
  in_flight_ = 0;
  pending_.clear();
  engine_ = std::move(engine);
}

void Device::probe() {
  struct Trial {
    AlignedBuffer written{kPage}, read{kPage};
    Part parts[2];
  };
  auto trial = std::make_unique<Trial>();
  char* written = trial->written.data();
  for (std::size_t i = 0; i < kPage; ++i) written[i] = static_cast<char>(i * 37 + i / 251);
  for (const bool is_write : {true, false}) {
    Part& part = trial->parts[is_write];
    part.is_write = is_write;
    Request request;
    request.fd = fd_;
    request.is_write = is_write;
    request.data = is_write ? written : trial->read.data();
    request.size = kPage;
    part.requests.push_back(request);
    try {
      start(part);
      wait(part);
    } catch (...) {
      (void)trial.release();  // the kernel may still be using it
      throw;
    }
    if (part.error) fail(part.error, is_write ? "a write" : "a read");
  }
  if (std::memcmp(written, trial->read.data(), kPage) != 0) fail(EIO, "what was read is not what was written");
}

void Device::resize(std::uint64_t from, std::uint64_t to) {
  if (to <= from) return;
  int done;
  do {
    done = fallocate(fd_, 0, static_cast<off_t>(from), static_cast<off_t>(to - from));
  } while (done < 0 && errno == EINTR);
  if (done == 0) return;
  const int error = errno;
  if (error == EOPNOTSUPP || error == ENOSYS) {
    allocation_reason = because("fallocate", error);
    if (ftruncate(fd_, static_cast<off_t>(to)) == 0) return;
    fail(errno, "ftruncate");
  }
  if (ftruncate(fd_, static_cast<off_t>(from)) < 0) fail(errno, "ftruncate after fallocate failed");
  fail(error, "fallocate");
}

void Device::cut(std::uint64_t size) {
  // If this fails, the space is freed together with the file.
  if (ftruncate(fd_, static_cast<off_t>(size)) < 0) allocation_reason = because("ftruncate", errno);
}

void Device::start(Part& part) {
  std::unique_lock<std::mutex> lock(mutex_);
  part.remaining = part.requests.size();
  for (Request& request : part.requests) {
    request.part = &part;
    pending_.push_back(&request);
  }
  // What has ended meanwhile frees slots. Not while another thread waits in the kernel for exactly that.
  if (reaping_) {
    pump();
  } else {
    collect();
  }
}

void Device::wait(Part& part) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (part.remaining > 0) reap_one(lock);
}

void Device::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (in_flight_ > 0 || !pending_.empty()) reap_one(lock);
}

// One thread waits in the kernel, the others wait for that thread.
void Device::reap_one(std::unique_lock<std::mutex>& lock) {
  if (reaping_) {
    changed_.wait(lock);
    return;
  }
  reaping_ = true;
  lock.unlock();
  try {
    engine_->wait();
  } catch (...) {
    lock.lock();
    reaping_ = false;
    changed_.notify_all();
    throw;
  }
  lock.lock();
  reaping_ = false;
  collect();
  changed_.notify_all();
}

// Takes what has ended and fills the slots it leaves.
void Device::collect() {
  completions_.clear();
  engine_->reap(completions_);
  for (const Completion& completion : completions_) finish(completion);
  pump();
}

void Device::pump() {
  while (in_flight_ < depth_ && !pending_.empty()) {
    batch_.clear();
    while (in_flight_ + batch_.size() < depth_ && !pending_.empty()) {
      batch_.push_back(pending_.front());
      pending_.pop_front();
    }
    std::vector<Completion> refused;
    in_flight_ += static_cast<unsigned>(batch_.size());
    engine_->submit(batch_, refused);
    for (const Completion& completion : refused) finish(completion);
    if (!refused.empty()) changed_.notify_all();
  }
}

// Puts the rest of a partial transfer back at the head of the queue.
void Device::finish(const Completion& completion) {
  Request& request = *completion.request;
  Part& part = *request.part;
  --in_flight_;
  const std::int64_t result = completion.result;
  if (result >= 0) {
    // Only whole blocks count: a direct transfer cannot continue from within a block.
    const std::size_t moved = static_cast<std::size_t>(result) == request.next_size()
                                  ? request.next_size()
                                  : static_cast<std::size_t>(result) / kPage * kPage;
    request.done += moved;
    if (moved > 0) request.tries = 0;
    if (request.next_size() > 0) {
      const bool at_end = moved == 0 && !request.is_write;
      if (!at_end && ++request.tries < kMaxTries) {
        pending_.push_front(&request);
        return;
      }
      part.fail(at_end ? ENODATA : EIO, request.logical + request.done + static_cast<std::uint64_t>(result), at_end);
    }
  } else if ((result == -EINTR || result == -EAGAIN || result == -ECANCELED) && ++request.tries < kMaxTries) {
    // Cancelled: the thread that submitted it has ended.
    pending_.push_front(&request);
    return;
  } else {
    part.fail(static_cast<int>(-result), request.logical + request.done, false);
  }
  --part.remaining;
}

// Of several failures the first in the file is reported.
void Part::fail(int number, std::uint64_t offset, bool file_ended) {
  if (error && error_offset <= offset) return;
  error = number;
  error_offset = offset;
  at_end = file_ended;
}

}  // namespace zerotrain
