#include "key_memory.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

namespace zerotrain {

namespace {

constexpr std::size_t kSlot = 64;
constexpr std::size_t kBlockBytes = 32 * 1024;  // a dozen threads' contexts; small limits on locked memory are 64 KiB

std::string locked_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return " (RLIMIT_MEMLOCK is " + std::to_string(limit.rlim_cur) + " bytes)";
}

}  // namespace

void cleanse(void* start, std::size_t bytes) {
  std::memset(start, 0, bytes);
  __asm__ __volatile__("" : : "r"(start) : "memory");
}

#if defined(__x86_64__)

namespace {

__attribute__((target("avx"))) void clear_lower_registers() {
  __asm__ __volatile__("vzeroall"
                       :
                       :
                       : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15");
}

__attribute__((target("avx512f"))) void clear_upper_registers() {
  __asm__ __volatile__(
      "vpxorq %%zmm16, %%zmm16, %%zmm16\n\t"
      "vpxorq %%zmm17, %%zmm17, %%zmm17\n\t"
      "vpxorq %%zmm18, %%zmm18, %%zmm18\n\t"
      "vpxorq %%zmm19, %%zmm19, %%zmm19\n\t"
      "vpxorq %%zmm20, %%zmm20, %%zmm20\n\t"
      "vpxorq %%zmm21, %%zmm21, %%zmm21\n\t"
      "vpxorq %%zmm22, %%zmm22, %%zmm22\n\t"
      "vpxorq %%zmm23, %%zmm23, %%zmm23\n\t"
      "vpxorq %%zmm24, %%zmm24, %%zmm24\n\t"
      "vpxorq %%zmm25, %%zmm25, %%zmm25\n\t"
      "vpxorq %%zmm26, %%zmm26, %%zmm26\n\t"
      "vpxorq %%zmm27, %%zmm27, %%zmm27\n\t"
      "vpxorq %%zmm28, %%zmm28, %%zmm28\n\t"
      "vpxorq %%zmm29, %%zmm29, %%zmm29\n\t"
      "vpxorq %%zmm30, %%zmm30, %%zmm30\n\t"
      "vpxorq %%zmm31, %%zmm31, %%zmm31\n\t"
      :
      :
      : "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26",
        "xmm27", "xmm28", "xmm29", "xmm30", "xmm31");
}

}  // namespace

void clear_vector_registers() {
  if (__builtin_cpu_supports("avx")) clear_lower_registers();
  if (__builtin_cpu_supports("avx512f")) clear_upper_registers();
}

#elif defined(__aarch64__)

void clear_vector_registers() {
  // The other registers belong to the caller: a cipher restores them.
  __asm__ __volatile__(
      "movi v0.2d, #0\n\t"
      "movi v1.2d, #0\n\t"
      "movi v2.2d, #0\n\t"
      "movi v3.2d, #0\n\t"
      "movi v4.2d, #0\n\t"
      "movi v5.2d, #0\n\t"
      "movi v6.2d, #0\n\t"
      "movi v7.2d, #0\n\t"
      "movi v16.2d, #0\n\t"
      "movi v17.2d, #0\n\t"
      "movi v18.2d, #0\n\t"
      "movi v19.2d, #0\n\t"
      "movi v20.2d, #0\n\t"
      "movi v21.2d, #0\n\t"
      "movi v22.2d, #0\n\t"
      "movi v23.2d, #0\n\t"
      "movi v24.2d, #0\n\t"
      "movi v25.2d, #0\n\t"
      "movi v26.2d, #0\n\t"
      "movi v27.2d, #0\n\t"
      "movi v28.2d, #0\n\t"
      "movi v29.2d, #0\n\t"
      "movi v30.2d, #0\n\t"
      "movi v31.2d, #0\n\t"
      :
      :
      : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18", "v19", "v20", "v21", "v22",
        "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31");
}

#else

void clear_vector_registers() {}

#endif

KeyMemory& KeyMemory::shared() {
  static KeyMemory* memory = new KeyMemory;  // never destroyed: libcrypto may free after static destructors ran
  return *memory;
}

void* KeyMemory::allocate(std::size_t bytes) {
  const std::size_t slots = std::max<std::size_t>(1, (bytes + kSlot - 1) / kSlot);
  std::lock_guard<std::mutex> guard(lock_);
  if (owner_ != getpid()) {
    // A forked child starts anew: the pages that it inherited are zeros, and no longer locked.
    blocks_.clear();
    missing_.clear();
    owner_ = getpid();
  }
  for (Block& block : blocks_) {
    if (void* start = take(block, slots)) return start;
  }
  return take(grow(slots), slots);
}

void* KeyMemory::take(Block& block, std::size_t slots) {
  std::size_t free = 0;
  for (std::size_t slot = 0; slot < block.taken.size(); ++slot) {
    free = block.taken[slot] ? 0 : free + 1;
    if (free < slots) continue;
    const std::size_t first = slot + 1 - slots;
    std::fill(block.taken.begin() + first, block.taken.begin() + slot + 1, true);
    block.runs[first] = static_cast<unsigned short>(slots);
    return block.start + first * kSlot;
  }
  return nullptr;
}

KeyMemory::Block& KeyMemory::grow(std::size_t slots) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t wanted = std::max(kBlockBytes, slots * kSlot);
  const std::size_t bytes = (wanted + page - 1) / page * page;
  if (bytes / kSlot > 0xffff) throw std::bad_alloc();
  // An inaccessible page on either side: an overrun elsewhere neither reads nor writes the key.
  void* mapped = mmap(nullptr, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* start = static_cast<unsigned char*>(mapped) + page;
  if (mprotect(start, bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  std::string missing;
  const auto note = [&missing](bool done, const std::string& what) {
    if (!done) missing += (missing.empty() ? "" : "; ") + what + ": " + std::strerror(errno);
  };
  note(mlock(start, bytes) == 0, "not locked, the system may swap it" + locked_limit());
  note(madvise(start, bytes, MADV_DONTDUMP) == 0, "a core would hold it");
  note(madvise(start, bytes, MADV_WIPEONFORK) == 0, "forked children inherit it");
  if (missing_.empty()) missing_ = missing;
  blocks_.push_back({start, std::vector<unsigned short>(bytes / kSlot), std::vector<bool>(bytes / kSlot)});
  return blocks_.back();
}

KeyMemory::Block* KeyMemory::find(const void* address) {
  const auto* byte = static_cast<const unsigned char*>(address);
  for (Block& block : blocks_) {
    if (byte >= block.start && byte < block.start + block.taken.size() * kSlot) return &block;
  }
  return nullptr;
}

bool KeyMemory::owns(const void* address) {
  std::lock_guard<std::mutex> guard(lock_);
  return find(address) != nullptr;
}

std::size_t KeyMemory::size_of(const void* start) {
  std::lock_guard<std::mutex> guard(lock_);
  const Block* block = find(start);
  if (!block) return 0;
  return block->runs[(static_cast<const unsigned char*>(start) - block->start) / kSlot] * kSlot;
}

void KeyMemory::release(void* start) {
  std::lock_guard<std::mutex> guard(lock_);
  Block* block = find(start);
  if (!block) return;
  const std::size_t first = (static_cast<unsigned char*>(start) - block->start) / kSlot;
  const std::size_t slots = block->runs[first];
  cleanse(start, slots * kSlot);
  std::fill(block->taken.begin() + first, block->taken.begin() + first + slots, false);
  block->runs[first] = 0;
}

std::string KeyMemory::describe() {
  std::lock_guard<std::mutex> guard(lock_);
  if (!missing_.empty()) return missing_;
  return "locked, not in cores, wiped in forked children";
}

std::size_t KeyMemory::bytes_in_use() {
  std::lock_guard<std::mutex> guard(lock_);
  std::size_t slots = 0;
  for (const Block& block : blocks_) slots += std::count(block.taken.begin(), block.taken.end(), true);
  return slots * kSlot;
}

}  // namespace zerotrain
