#include "zerotrain/spill_file.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "zerotrain/aligned.hpp"

namespace zerotrain {
namespace {

struct EngineKind {
  const char* name;
  std::unique_ptr<Engine> (*make)(unsigned depth);
};

constexpr EngineKind kEngines[] = {
    {"io_uring", &make_uring_engine}, {"libaio", &make_libaio_engine}, {"threads", &make_thread_engine}};

}  // namespace

SpillFile::SpillFile(const std::vector<std::string>& folders, std::uint64_t size, const SpillOptions& options)
    : options_(options), owner_(getpid()) {
  if (folders.empty()) throw std::invalid_argument("folders is empty; give at least one");
  if (options.queue_depth < 1 || options.queue_depth > 4096) {
    throw std::invalid_argument("queue_depth must be 1 to 4096; got " + std::to_string(options.queue_depth));
  }
  for (const auto& [name, bytes] : {std::pair("request_bytes", options.request_bytes),
                                    std::pair("stripe_bytes", options.stripe_bytes)}) {
    if (bytes < kPage || bytes % kPage || bytes > (std::size_t(1) << 30)) {
      throw std::invalid_argument(std::string(name) + " must be a multiple of 4096, at most 1 GiB; got " +
                                  std::to_string(bytes));
    }
  }
  for (const std::string& folder : folders) devices_.push_back(std::make_unique<Device>(folder, options.queue_depth));
  choose_engine();
  resize(size);
}

SpillFile::~SpillFile() {
  // A forked child leaves the rings to its parent; its copies of the descriptors were closed at the fork.
  if (!is_owner()) {
    for (auto& device : devices_) (void)device.release();
  }
}

void SpillFile::choose_engine() {
  std::string refused, known;
  for (const EngineKind& kind : kEngines) {
    known += (known.empty() ? "" : ", ") + std::string(kind.name);
    if (options_.engine != "auto" && options_.engine != kind.name) continue;
    try {
      for (auto& device : devices_) {
        device->use(kind.make(options_.queue_depth));
        device->probe();
      }
      engine = kind.name;
      engine_reason = options_.engine == "auto" ? refused : "asked for by name";
      return;
    } catch (const std::system_error& error) {
      refused += (refused.empty() ? "" : "; ") + std::string(kind.name) + " refused: " + error.what();
      if (options_.engine != "auto" || &kind == std::end(kEngines) - 1) {
        throw std::system_error(error.code(), "no I/O engine works here: " + refused);
      }
    }
  }
  throw std::invalid_argument("engine '" + options_.engine + "' is not known; give auto, " + known);
}

bool SpillFile::is_owner() const { return getpid() == owner_; }

std::uint64_t SpillFile::share(std::size_t device, std::uint64_t size) const {
  const std::uint64_t stripe = options_.stripe_bytes, count = devices_.size();
  const std::uint64_t stripes = (size + stripe - 1) / stripe;
  if (count == 1) return size;
  const std::uint64_t whole = stripes / count + (device < stripes % count ? 1 : 0);
  const bool has_last = stripes > 0 && (stripes - 1) % count == device;
  return whole * stripe - (has_last ? stripes * stripe - size : 0);
}

void SpillFile::resize(std::uint64_t size) {
  if (size % kPage) throw std::invalid_argument("the spill file's size must be a multiple of 4096");
  std::size_t grown = 0;
  try {
    for (; grown < devices_.size(); ++grown) devices_[grown]->resize(share(grown, size_), share(grown, size));
  } catch (...) {
    for (std::size_t i = 0; i < grown; ++i) devices_[i]->cut(share(i, size_));
    throw;
  }
  size_ = std::max<std::uint64_t>(size_, size);
}

void SpillFile::check(std::uint64_t offset, const char* data, std::size_t size) const {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  for (const auto& [name, value] :
       {std::pair<const char*, std::uint64_t>("offset", offset), {"size", size}, {"address", address}}) {
    if (value % kPage) {
      throw std::invalid_argument(std::string("the buffer's ") + name + " " + std::to_string(value) +
                                  " is not a multiple of 4096; take memory of aligned_buffer and whole blocks");
    }
  }
  if (size == 0 || offset > size_ || size > size_ - offset) {
    throw std::invalid_argument(std::to_string(size) + " bytes at offset " + std::to_string(offset) +
                                " are not inside of the spill file's " + std::to_string(size_));
  }
}

std::unique_ptr<Transfer> SpillFile::start(bool is_write, std::uint64_t offset, char* data, std::size_t size) {
  check(offset, data, size);
  auto transfer = std::make_unique<Transfer>();
  transfer->parts.resize(devices_.size());
  const std::uint64_t stripe = options_.stripe_bytes, count = devices_.size();
  for (std::size_t done = 0; done < size;) {
    const std::uint64_t at = offset + done;
    const std::uint64_t index = at / stripe, within = at % stripe;
    std::size_t step = std::min(size - done, options_.request_bytes);
    if (count > 1) step = std::min<std::uint64_t>(step, stripe - within);
    const std::size_t device = count > 1 ? index % count : 0;
    Request request;
    request.fd = devices_[device]->fd();
    request.is_write = is_write;
    request.data = data + done;
    request.size = step;
    request.offset = count > 1 ? index / count * stripe + within : at;
    request.logical = at;
    transfer->parts[device].is_write = is_write;
    transfer->parts[device].requests.push_back(request);
    done += step;
  }
  for (std::size_t i = 0; i < devices_.size(); ++i) devices_[i]->start(transfer->parts[i]);
  (is_write ? bytes_written : bytes_read) += size;
  return transfer;
}

void SpillFile::wait(Transfer& transfer) {
  for (std::size_t i = 0; i < devices_.size(); ++i) devices_[i]->wait(transfer.parts[i]);
  const Part* failed = nullptr;
  for (const Part& part : transfer.parts) {
    if (part.error && (!failed || part.error_offset < failed->error_offset)) failed = &part;
  }
  if (!failed) return;
  const std::string what = std::string(failed->is_write ? "write" : "read") + " at file offset " +
                           std::to_string(failed->error_offset) + " failed: ";
  const std::string why = failed->at_end ? "the file ends there (truncated)" : std::strerror(failed->error);
  throw TransferError(failed->error, failed->error_offset, what + why + " [" + engine + "]");
}

void SpillFile::drain() {
  for (auto& device : devices_) device->drain();
}

}  // namespace zerotrain
