// The optimizer's arithmetic on chunks of states in the layout of the spill store: [master or remainder][state 0][state 1],
// one after another, without the first part if the task has the master itself (fp32 weights). Called by the sealer
// between opening and sealing, and alone for plain chunks.
#pragma once

#include <cstddef>

#include "zerotrain/update.hpp"

namespace zerotrain {

// Adjacent chunks in memory; all have `chunk_bytes` but the last, which may be shorter.
struct ChunkData {
  unsigned char* data;
  std::size_t num_bytes;
  std::size_t chunk_bytes;

  std::size_t count() const { return (num_bytes + chunk_bytes - 1) / chunk_bytes; }
  unsigned char* start(std::size_t chunk) const { return data + chunk * chunk_bytes; }
  std::size_t size(std::size_t chunk) const;
};

// The layout of a task's elements in chunks.
struct ChunkUpdate {
  UpdateTask task;
  std::size_t start;  // element of the task at which the first chunk begins
  bool has_remainder;  // the master is the task's bf16 weight and the chunk's int16 remainder
  std::size_t element_bytes;  // of a chunk's parts together

  // Throws std::invalid_argument if the chunks do not match the task.
  void check(const ChunkData& chunks) const;
  // Updates one open chunk.
  void run(const ChunkData& chunks, std::size_t chunk) const;
};

// Updates all chunks on the pool.
void update_chunks(const ChunkData& chunks, const ChunkUpdate& update);

}  // namespace zerotrain
