// Encrypts and authenticates chunks of the spill store in place, on the module's threads. One sealer has one key, which is
// in KeyMemory from construction to close() and nowhere else.
//
// nonce      = u32 record || u64 counter, a new counter at every encryption; no two encryptions of a key share one
// associated = the record's context (job, rank, unit, layout) || record, tile, chunk, bytes, generation
// A record's table has 28 bytes per chunk: all tags (16), then all counters (8), then all generations (4). The
// generation distinguishes the newest bytes of a place from older ones and from those of other places.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "cipher.hpp"
#include "fused.hpp"

namespace zerotrain {

constexpr std::size_t kTileChunks = 64;

// 32 bytes in KeyMemory: from getrandom, or given (test vectors). Wiped by wipe() and by the destructor.
class Key {
 public:
  explicit Key(const unsigned char* given);
  ~Key() { wipe(); }
  Key(const Key&) = delete;
  Key& operator=(const Key&) = delete;

  unsigned char* bytes() const { return bytes_; }  // nullptr once wiped
  void wipe();
  // Throws std::runtime_error in a forked child, whose copy is zeros, and after wipe().
  void check() const;
  bool in_owner() const;

 private:
  unsigned char* bytes_;
  pid_t owner_;
};

struct SealedChunks {
  ChunkData chunks;
  std::size_t first;  // index in the record of the first chunk
  std::uint32_t record;
  Bytes context;
  unsigned char* table;
  std::size_t num_chunks;  // of the record

  unsigned char* tag(std::size_t chunk) const { return table + (first + chunk) * kTagBytes; }
  unsigned char* counter(std::size_t chunk) const { return table + num_chunks * kTagBytes + (first + chunk) * 8; }
  unsigned char* generation(std::size_t chunk) const {
    return table + num_chunks * (kTagBytes + 8) + (first + chunk) * 4;
  }
};

class Sealer {
 public:
  // `first_counter` is the first value of the nonces' counter.
  Sealer(std::shared_ptr<Key> key, std::uint64_t first_counter);
  ~Sealer();

  // Throws std::runtime_error before the first change if a generation or the counter would wrap.
  void seal(const SealedChunks& batch);
  // Returns the chunks, counted from the batch's first, that are not the last sealed ones, and zeroes them. The
  // others are open. Throws std::invalid_argument for a chunk that was never sealed.
  std::vector<std::size_t> open(const SealedChunks& batch);
  // Opens, updates and seals chunk by chunk, so that a chunk stays in the cache. A chunk that does not open is
  // zeroed, not updated, and returned.
  std::vector<std::size_t> update(const SealedChunks& batch, const ChunkUpdate& update);
  // Wipes the key and all contexts; every later call throws.
  void close();

 private:
  std::uint64_t next_counter();
  void seal_chunk(const SealedChunks& batch, std::size_t chunk);
  bool open_chunk(const SealedChunks& batch, std::size_t chunk);
  std::vector<std::size_t> opened(const SealedChunks& batch, const ChunkUpdate* update);

  std::shared_ptr<Key> key_;
  std::unique_ptr<Cipher> cipher_;
  std::atomic<std::uint64_t> counter_;
  std::shared_mutex closing_;
};

}  // namespace zerotrain
