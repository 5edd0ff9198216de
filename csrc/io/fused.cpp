#include "fused.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "zerotrain/isa.hpp"
#include "zerotrain/thread_pool.hpp"

namespace zerotrain {

namespace {

const Isa& best_isa() {
  std::size_t count = 0;
  return available_isas(count)[0];
}

}  // namespace

std::size_t ChunkData::size(std::size_t chunk) const {
  return std::min(chunk_bytes, num_bytes - chunk * chunk_bytes);
}

void ChunkUpdate::check(const ChunkData& chunks) const {
  const std::size_t master_bytes = task.master ? 0 : has_remainder ? sizeof(std::int16_t) : sizeof(float);
  const std::size_t element = master_bytes + num_states(task.rule) * width(task.state_type);
  if (element != element_bytes) {
    throw std::invalid_argument("chunks have " + std::to_string(element_bytes) + " bytes per element, the update " +
                                std::to_string(element));
  }
  if (chunks.chunk_bytes % element || chunks.num_bytes % element) {
    throw std::invalid_argument("chunks of " + std::to_string(chunks.chunk_bytes) + " and " +
                                std::to_string(chunks.num_bytes) + " bytes in all do not hold whole elements of " +
                                std::to_string(element) + " bytes");
  }
  const std::size_t stop = start + chunks.num_bytes / element;
  if (stop > task.numel) {
    throw std::invalid_argument("chunks hold elements " + std::to_string(start) + " to " + std::to_string(stop) +
                                ", the update has " + std::to_string(task.numel));
  }
  if (has_remainder && !task.master && task.weight_type != Float::bf16) {
    throw std::invalid_argument("chunks with remainders need the bfloat16 weight in the update");
  }
}

void ChunkUpdate::run(const ChunkData& chunks, std::size_t chunk) const {
  const std::size_t numel = chunks.size(chunk) / element_bytes;
  const std::size_t first = start + chunk * (chunks.chunk_bytes / element_bytes);
  unsigned char* at = chunks.start(chunk);
  UpdateTask part = task.part(first, first + numel);
  if (part.master) {
    // The weight in memory is the master.
  } else if (has_remainder) {
    part.remainder = reinterpret_cast<std::int16_t*>(at);
    at += numel * sizeof(std::int16_t);
  } else {
    part.master = at;
    at += numel * sizeof(float);
  }
  for (std::size_t state = 0; state < num_states(task.rule); ++state) {
    part.state[state] = at;
    at += numel * width(task.state_type);
  }
  update_range(part, 0, numel, best_isa());
}

void update_chunks(const ChunkData& chunks, const ChunkUpdate& update) {
  update.check(chunks);
  ThreadPool::shared().run(chunks.count(), [&](std::size_t chunk) { update.run(chunks, chunk); });
}

}  // namespace zerotrain
