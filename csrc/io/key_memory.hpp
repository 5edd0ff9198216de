// Memory for the spill store's key and everything that the cipher derives from it: locked, left out of cores, wiped in
// forked children, and cleansed when freed. Used by the sealer and, through its allocator, by libcrypto.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

namespace zerotrain {

class KeyMemory {
 public:
  // One per process: libcrypto's allocator has no other way to find it.
  static KeyMemory& shared();

  // Returns zeroed bytes at 64-byte boundaries; throws std::bad_alloc.
  void* allocate(std::size_t bytes);
  // Overwrites the bytes first.
  void release(void* start);
  bool owns(const void* address);
  // The bytes for which `start` was allocated, rounded up; 0 for another address.
  std::size_t size_of(const void* start);

  // The guards that the system granted, for users: "locked, not in cores, wiped in forked children", or the missing
  // ones with the reason.
  std::string describe();
  std::size_t bytes_in_use();

 private:
  struct Block {
    unsigned char* start;
    std::vector<unsigned short> runs;  // number of slots allocated from each slot on; 0: free or inside of a run
    std::vector<bool> taken;
  };
  void* take(Block& block, std::size_t slots);
  Block& grow(std::size_t slots);
  Block* find(const void* address);

  std::mutex lock_;
  std::vector<Block> blocks_;
  std::string missing_;  // guards that the system refused
  pid_t owner_ = 0;
};

// Overwrites bytes; cannot be optimised away.
void cleanse(void* start, std::size_t bytes);

// Clears the calling thread's vector registers. Ciphers leave parts of the expanded key there, where a core of the
// idle process would show them.
void clear_vector_registers();

}  // namespace zerotrain
