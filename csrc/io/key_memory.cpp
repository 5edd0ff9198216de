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

KeyMemory& KeyMemory::shared() {
  static KeyMemory* memory = new KeyMemory;  // never destroyed: libcrypto may free after static destructors ran
  return *memory;
}

void* KeyMemory::allocate(std::size_t bytes) {
  const std::size_t slots = std::max<std::size_t>(1, (bytes + kSlot - 1) / kSlot);
  std::lock_guard<std::mutex> guard(lock_);
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
  // A page that cannot be touched on either side: an overrun elsewhere neither reads nor writes the key.
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
