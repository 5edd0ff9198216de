// Memory for the spill store's key and for what the cipher derives from it: locked, left out of cores, wiped in forked
// children, cleansed when it is given back. Used by the sealer and, through its allocator, by libcrypto.
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

  // Zeroed bytes, at 64-byte borders; throws std::bad_alloc.
  void* allocate(std::size_t bytes);
  // Overwrites the bytes first.
  void release(void* start);
  bool owns(const void* address);
  // Bytes that `start` was allocated with, rounded up; 0 for another address.
  std::size_t size_of(const void* start);

  // What the system granted, for people: "locked, not in cores, wiped in forked children" or what is missing and why.
  std::string describe();
  std::size_t bytes_in_use();

 private:
  struct Block {
    unsigned char* start;
    std::vector<unsigned short> runs;  // slots taken from each slot on; 0: free or inside of a run
    std::vector<bool> taken;
  };
  void* take(Block& block, std::size_t slots);
  Block& grow(std::size_t slots);
  Block* find(const void* address);

  std::mutex lock_;
  std::vector<Block> blocks_;
  std::string missing_;  // of the guards that the system refused
  pid_t owner_ = 0;
};

// Cannot be optimised away.
void cleanse(void* start, std::size_t bytes);

// The calling thread's vector registers. Ciphers leave parts of the expanded key there, where a core of the idle
// process would show them.
void clear_vector_registers();

}  // namespace zerotrain
