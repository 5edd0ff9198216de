// Memory for O_DIRECT: page aligned, on huge pages where the system has them.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace zerotrain {

constexpr std::size_t kPage = 4096;

// A separate mapping; freed with the object. Left out of core files, as decrypted data passes through it, and out of
// forked children, as the kernel may be writing into it at the fork.
class AlignedBuffer {
 public:
  // Throws std::system_error if the system has no memory; `size` is rounded up to a page.
  explicit AlignedBuffer(std::size_t size);
  ~AlignedBuffer();
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;

  char* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  char* data_;
  std::size_t size_;
  pid_t owner_;
};

}  // namespace zerotrain
