#include "sealer.hpp"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "key_memory.hpp"
#include "zerotrain/thread_pool.hpp"

namespace zerotrain {

Key::Key(const unsigned char* given)
    : bytes_(static_cast<unsigned char*>(KeyMemory::shared().allocate(kKeyBytes))), owner_(getpid()) {
  if (given) {
    std::memcpy(bytes_, given, kKeyBytes);
    return;
  }
  std::size_t have = 0;
  while (have < kKeyBytes) {
    const ssize_t got = getrandom(bytes_ + have, kKeyBytes - have, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      const int reason = errno;
      wipe();
      throw std::system_error(reason, std::generic_category(), "getrandom for the spill store's key");
    }
    have += static_cast<std::size_t>(got);
  }
}

void Key::wipe() {
  // In a forked child the page is zeros already, and a thread that does not exist there may hold its lock.
  if (bytes_ && in_owner()) KeyMemory::shared().release(bytes_);
  bytes_ = nullptr;
}

bool Key::in_owner() const { return owner_ == getpid(); }

void Key::check() const {
  if (!in_owner()) {
    throw std::runtime_error("a forked child has no spill store key; only the process that made the spill store may use it");
  }
  if (!bytes_) throw std::runtime_error("the spill store is closed; its key is wiped");
}

#ifdef ZEROTRAIN_OPENSSL

namespace {

void put(unsigned char* at, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) at[i] = static_cast<unsigned char>(value >> (8 * i));
}

std::uint64_t get(const unsigned char* at, std::size_t bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i) value |= static_cast<std::uint64_t>(at[i]) << (8 * i);
  return value;
}

std::vector<unsigned char> associated_data(const SealedChunks& batch, std::size_t chunk, std::uint64_t generation) {
  std::vector<unsigned char> data(batch.context.size + 20);
  std::copy(batch.context.start, batch.context.start + batch.context.size, data.begin());
  const std::size_t index = batch.first + chunk;
  const std::uint64_t fields[] = {batch.record, index / kTileChunks, index, batch.chunks.size(chunk), generation};
  for (std::size_t i = 0; i < 5; ++i) put(data.data() + batch.context.size + 4 * i, fields[i], 4);
  return data;
}

struct Nonce {
  unsigned char bytes[kNonceBytes];
  Nonce(std::uint32_t record, std::uint64_t counter) {
    put(bytes, record, 4);
    put(bytes + 4, counter, 8);
  }
};

std::string name_of(const SealedChunks& batch, std::size_t chunk) {
  return "chunk " + std::to_string(batch.first + chunk) + " of record " + std::to_string(batch.record);
}

// Runs at the end of a batch, however it ends.
struct BatchEnd {
  Cipher& cipher;
  ~BatchEnd() { cipher.end_batch(); }
};

void check_generations(const SealedChunks& batch, bool opens, bool seals) {
  for (std::size_t chunk = 0; chunk < batch.chunks.count(); ++chunk) {
    const std::uint64_t generation = get(batch.generation(chunk), 4);
    if (opens && generation == 0) {
      throw std::invalid_argument(name_of(batch, chunk) + " was never sealed: there is nothing to open");
    }
    if (seals && generation == std::numeric_limits<std::uint32_t>::max()) {
      throw std::runtime_error(name_of(batch, chunk) + " was sealed 2^32 - 1 times; a generation must not repeat");
    }
  }
}

}  // namespace

Sealer::Sealer(std::shared_ptr<Key> key, std::uint64_t first_counter)
    : key_(std::move(key)), counter_(first_counter) {
  key_->check();
  cipher_ = std::make_unique<Cipher>(key_->bytes());
}

Sealer::~Sealer() { close(); }

void Sealer::close() {
  if (!key_->in_owner()) {
    // Contexts point into pages that are zeros here: they are forgotten, not freed.
    if (cipher_) cipher_.release();
    return;
  }
  std::unique_lock<std::shared_mutex> alone(closing_);
  cipher_.reset();
  key_->wipe();
}

std::uint64_t Sealer::next_counter() {
  std::uint64_t counter = counter_.load();
  do {
    if (counter == std::numeric_limits<std::uint64_t>::max()) {
      throw std::runtime_error("the key has no unused nonce left; a nonce must not repeat");
    }
  } while (!counter_.compare_exchange_weak(counter, counter + 1));
  return counter;
}

void Sealer::seal_chunk(const SealedChunks& batch, std::size_t chunk) {
  const std::uint64_t generation = get(batch.generation(chunk), 4) + 1;
  const std::uint64_t counter = next_counter();
  const std::vector<unsigned char> associated = associated_data(batch, chunk, generation);
  const Nonce nonce(batch.record, counter);
  unsigned char tag[kTagBytes];
  cipher_->encrypt(nonce.bytes, {associated.data(), associated.size()}, batch.chunks.start(chunk),
                   batch.chunks.size(chunk), tag);
  std::memcpy(batch.tag(chunk), tag, kTagBytes);
  put(batch.counter(chunk), counter, 8);
  put(batch.generation(chunk), generation, 4);
}

bool Sealer::open_chunk(const SealedChunks& batch, std::size_t chunk) {
  const std::vector<unsigned char> associated = associated_data(batch, chunk, get(batch.generation(chunk), 4));
  const Nonce nonce(batch.record, get(batch.counter(chunk), 8));
  if (cipher_->decrypt(nonce.bytes, {associated.data(), associated.size()}, batch.chunks.start(chunk),
                       batch.chunks.size(chunk), batch.tag(chunk))) {
    return true;
  }
  std::memset(batch.chunks.start(chunk), 0, batch.chunks.size(chunk));
  return false;
}

void Sealer::seal(const SealedChunks& batch) {
  key_->check();
  std::shared_lock<std::shared_mutex> open(closing_);
  key_->check();
  check_generations(batch, false, true);
  const BatchEnd end{*cipher_};
  ThreadPool::shared().run(batch.chunks.count(), [&](std::size_t chunk) { seal_chunk(batch, chunk); });
}

std::vector<std::size_t> Sealer::opened(const SealedChunks& batch, const ChunkUpdate* update) {
  key_->check();
  std::shared_lock<std::shared_mutex> open(closing_);
  key_->check();
  check_generations(batch, true, update != nullptr);
  const BatchEnd end{*cipher_};
  std::vector<unsigned char> genuine(batch.chunks.count());
  ThreadPool::shared().run(batch.chunks.count(), [&](std::size_t chunk) {
    genuine[chunk] = open_chunk(batch, chunk);
    if (!genuine[chunk] || !update) return;
    update->run(batch.chunks, chunk);
    seal_chunk(batch, chunk);
  });
  std::vector<std::size_t> failed;
  for (std::size_t chunk = 0; chunk < genuine.size(); ++chunk) {
    if (!genuine[chunk]) failed.push_back(chunk);
  }
  return failed;
}

std::vector<std::size_t> Sealer::open(const SealedChunks& batch) { return opened(batch, nullptr); }

std::vector<std::size_t> Sealer::update(const SealedChunks& batch, const ChunkUpdate& update) {
  update.check(batch.chunks);
  return opened(batch, &update);
}

#endif

}  // namespace zerotrain
