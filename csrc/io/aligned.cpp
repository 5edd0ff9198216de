#include "zerotrain/aligned.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>

namespace zerotrain {
namespace {

constexpr std::size_t kHugePage = std::size_t(2) << 20;

}  // namespace

AlignedBuffer::AlignedBuffer(std::size_t size) : size_((size + kPage - 1) / kPage * kPage), owner_(getpid()) {
  if (size_ == 0) size_ = kPage;
  // Longer by a huge page, so that it can start on one; the rest is unmapped.
  const std::size_t mapped = size_ + kHugePage;
  void* all = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mmap of " + std::to_string(size_) + " bytes");
  }
  const auto start = reinterpret_cast<std::uintptr_t>(all);
  const std::uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  data_ = reinterpret_cast<char*>(aligned);
  if (aligned > start) munmap(all, aligned - start);
  // Some systems map in units larger than our pages.
  const auto unit = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t stop = (aligned + size_ + unit - 1) / unit * unit, mapped_stop = start + mapped;
  if (mapped_stop > stop) munmap(reinterpret_cast<void*>(stop), mapped_stop - stop);
  // These are hints: a system without one of them works all the same.
  madvise(data_, size_, MADV_HUGEPAGE);
  madvise(data_, size_, MADV_DONTDUMP);
  madvise(data_, size_, MADV_DONTFORK);
}

AlignedBuffer::~AlignedBuffer() {
  // The mapping was never in a forked child: whatever is mapped there now is something else.
  if (getpid() == owner_) munmap(data_, size_);
}

}  // namespace zerotrain
