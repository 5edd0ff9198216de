// The spill file's part of the Python module: typed, zero-copy arrays as inputs; system calls run without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "zerotrain/aligned.hpp"
#include "zerotrain/bind.hpp"
#include "zerotrain/gil.hpp"
#include "zerotrain/spill_file.hpp"

namespace nb = nanobind;
using namespace zerotrain;

namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void raise_os_error(int error, const std::string& message, const nb::object& offset) {
  nb::object raised = nb::borrow<nb::object>(PyExc_OSError)(error, message);
  nb::setattr(raised, "offset", offset);
  PyErr_SetObject(PyExc_OSError, raised.ptr());
  throw nb::python_error();
}

// Runs `work` without the GIL; a system error becomes an OSError.
template <class Work>
auto unlocked(const Work& work) {
  int error = 0;
  std::string message;
  nb::object offset = nb::none();
  std::uint64_t place = 0;
  bool has_place = false;
  try {
    GilReleased released;
    return work();
  } catch (const TransferError& failed) {
    error = failed.error;
    message = failed.what();
    place = failed.offset;
    has_place = true;
  } catch (const std::system_error& failed) {
    error = failed.code().value();
    message = failed.what();
  }
  if (has_place) offset = nb::int_(place);
  raise_os_error(error, message, offset);
}

// The file, and the buffers that the kernel may be using. Threads that wait keep the file until they are done.
class PySpillFile {
 public:
  PySpillFile(const std::vector<std::string>& folders, std::uint64_t num_bytes, const SpillOptions& options)
      : file_(unlocked([&] { return std::make_shared<SpillFile>(folders, num_bytes, options); })) {}

  PySpillFile(const PySpillFile&) = delete;
  PySpillFile& operator=(const PySpillFile&) = delete;

  ~PySpillFile() {
    if (!file_) return;
    if (file_->is_owner()) {
      try {
        close();
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("closing a spill file");
      }
      return;
    }
    // A forked child owns neither the rings nor the memory that they refer to.
    file_.reset();
    for (auto& [ticket, pending] : pending_) (void)pending.transfer.release();
  }

  std::uint64_t start(bool is_write, std::uint64_t offset, Bytes buffer) {
    const std::shared_ptr<SpillFile> file = usable();
    auto transfer =
        unlocked([&] { return file->start(is_write, offset, reinterpret_cast<char*>(buffer.data()), buffer.size()); });
    pending_.emplace(++last_, Pending{std::move(transfer), std::move(buffer)});
    return last_;
  }

  void wait(std::uint64_t ticket) {
    const std::shared_ptr<SpillFile> file = usable();
    const auto found = pending_.find(ticket);
    if (found == pending_.end()) {
      throw nb::value_error(("ticket " + std::to_string(ticket) + " is not open; each can be waited for once").c_str());
    }
    Pending pending = std::move(found->second);
    pending_.erase(found);
    bool has_ended = false;
    try {
      unlocked([&] {
        try {
          file->wait(*pending.transfer);
        } catch (const TransferError&) {
          has_ended = true;
          throw;
        }
      });
    } catch (...) {
      // The kernel may still be writing into it.
      if (!has_ended) pending_.emplace(ticket, std::move(pending));
      throw;
    }
  }

  void resize(std::uint64_t num_bytes) {
    const std::shared_ptr<SpillFile> file = usable();
    unlocked([&] { file->resize(num_bytes); });
  }

  void close() {
    if (!file_) return;
    std::shared_ptr<SpillFile> file = usable();
    file_.reset();  // no new call from here on
    try {
      unlocked([&] {
        file->drain();
        file.reset();
      });
    } catch (...) {
      // It is unknown when the kernel is done with them.
      (void)new std::map<std::uint64_t, Pending>(std::move(pending_));
      pending_.clear();
      throw;
    }
    pending_.clear();
  }

  // Both are valid until the call that requested them returns: it holds the GIL, and close() needs it.
  const SpillFile& file() const { return *usable(); }
  const Device& device(std::size_t index) const {
    const SpillFile& known = file();
    if (index >= known.num_devices()) throw nb::index_error("the spill file has no such folder");
    return known.device(index);
  }

 private:
  struct Pending {
    std::unique_ptr<Transfer> transfer;
    Bytes buffer;
  };

  const std::shared_ptr<SpillFile>& usable() const {
    if (!file_) throw std::runtime_error("the spill file is closed");
    if (!file_->is_owner()) {
      throw std::runtime_error("the spill file belongs to the process that made it; a forked child cannot use it");
    }
    return file_;
  }

  std::map<std::uint64_t, Pending> pending_;  // outlives the file, which waits for the kernel
  std::shared_ptr<SpillFile> file_;
  std::uint64_t last_ = 0;
};

nb::ndarray<nb::pytorch, std::uint8_t, nb::ndim<1>> aligned_buffer(std::size_t num_bytes) {
  auto buffer = unlocked([&] { return std::make_unique<AlignedBuffer>(num_bytes); });
  char* data = buffer->data();
  nb::capsule owner(buffer.release(), [](void* pointer) noexcept { delete static_cast<AlignedBuffer*>(pointer); });
  return nb::ndarray<nb::pytorch, std::uint8_t, nb::ndim<1>>(data, {num_bytes}, owner);
}

}  // namespace

void bind_io(nb::module_& m) {
  m.def("aligned_buffer", &aligned_buffer, nb::arg("num_bytes"),
        "A uint8 tensor on a page border, on huge pages where there are any, left out of cores and of forks.");
  nb::class_<PySpillFile>(m, "SpillFile")
      .def(
          "__init__",
          [](PySpillFile* self, const std::vector<std::string>& folders, std::uint64_t num_bytes,
             const std::string& engine, unsigned queue_depth, std::size_t request_bytes, std::size_t stripe_bytes) {
            new (self) PySpillFile(folders, num_bytes, {engine, queue_depth, request_bytes, stripe_bytes});
          },
          nb::arg("folders"), nb::arg("num_bytes"), nb::kw_only(), nb::arg("engine") = "auto",
          nb::arg("queue_depth") = 32, nb::arg("request_bytes") = std::size_t(1) << 20,
          nb::arg("stripe_bytes") = std::size_t(4) << 20)
      .def(
          "read", [](PySpillFile& self, std::uint64_t offset, Bytes buffer) { return self.start(false, offset, buffer); },
          nb::arg("offset"), nb::arg("buffer").noconvert(), "Starts a read into the buffer; returns a ticket.")
      .def(
          "write", [](PySpillFile& self, std::uint64_t offset, Bytes buffer) { return self.start(true, offset, buffer); },
          nb::arg("offset"), nb::arg("buffer").noconvert(), "Starts a write of the buffer; returns a ticket.")
      .def("wait", &PySpillFile::wait, nb::arg("ticket"),
           "Until nothing of it is under way. OSError with errno and `offset` in the file where it failed.")
      .def("resize", &PySpillFile::resize, nb::arg("num_bytes"), "Allocates up to this size; never shrinks.")
      .def("close", &PySpillFile::close, "Waits for what is under way and gives the space back.")
      .def("fileno", [](PySpillFile& self, std::size_t index) { return self.device(index).fd(); }, nb::arg("index") = 0)
      .def("is_direct", [](PySpillFile& self, std::size_t index) { return self.device(index).is_direct; },
           nb::arg("index") = 0)
      .def("direct_reason", [](PySpillFile& self, std::size_t index) { return self.device(index).direct_reason; },
           nb::arg("index") = 0)
      .def("unlinked_by", [](PySpillFile& self, std::size_t index) { return self.device(index).unlinked_by; },
           nb::arg("index") = 0)
      .def("allocation_reason",
           [](PySpillFile& self, std::size_t index) { return self.device(index).allocation_reason; },
           nb::arg("index") = 0)
      .def_prop_ro("num_folders", [](PySpillFile& self) { return self.file().num_devices(); })
      .def_prop_ro("num_bytes", [](PySpillFile& self) { return self.file().size(); })
      .def_prop_ro("engine", [](PySpillFile& self) { return self.file().engine; })
      .def_prop_ro("engine_reason", [](PySpillFile& self) { return self.file().engine_reason; })
      .def_prop_ro("bytes_read", [](PySpillFile& self) { return self.file().bytes_read.load(); })
      .def_prop_ro("bytes_written", [](PySpillFile& self) { return self.file().bytes_written.load(); });
}
