// The encryption's part of the Python module; zerotrain.runtime.spill.sealer_openssl and
// .sealer_cryptography are its callers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "key_memory.hpp"
#include "sealer.hpp"
#include "zerotrain/bind.hpp"
#include "zerotrain/bind_update.hpp"
#include "zerotrain/gil.hpp"

namespace nb = nanobind;
using namespace zerotrain;

namespace {

using Buffer = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const std::string& message) {
  if (!ok) throw nb::value_error(message.c_str());
}

Bytes view(const nb::bytes& bytes) {
  return {reinterpret_cast<const unsigned char*>(bytes.c_str()), bytes.size()};
}

std::shared_ptr<Key> make_key(const std::optional<nb::bytes>& given) {
  require(!given || given->size() == kKeyBytes, "a key has 32 bytes");
  return std::make_shared<Key>(given ? view(*given).start : nullptr);
}

nb::object key_view(const std::shared_ptr<Key>& key) {
  key->check();
  std::size_t shape[1] = {kKeyBytes};
  return nb::cast(nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>>(key->bytes(), 1, shape, nb::cast(key)));
}

// A batch from Python; holds its arrays.
struct BoundChunks {
  Buffer data, table;
  nb::bytes context;
  std::uint32_t record;
  std::size_t first, chunk_bytes;

  ChunkData chunks() const { return {data.data(), data.size(), chunk_bytes}; }

  SealedChunks sealed() const {
    const std::size_t per_chunk = kTagBytes + 8 + 4;
    require(table.size() % per_chunk == 0, "table: must have 28 bytes per chunk");
    const std::size_t num_chunks = table.size() / per_chunk;
    require(first + chunks().count() <= num_chunks,
            "chunks end at " + std::to_string(first + chunks().count()) + ", the table has " +
                std::to_string(num_chunks));
    return {chunks(), first, record, view(context), table.data(), num_chunks};
  }
};

void update_plain(const BoundChunks& batch, const BoundTask& task, std::size_t start, bool has_remainder,
                  std::size_t element_bytes) {
  const ChunkData chunks = batch.chunks();
  const ChunkUpdate update{task.task, start, has_remainder, element_bytes};
  GilReleased unlocked;
  update_chunks(chunks, update);
}

void check_update(const BoundChunks& batch, const BoundTask& task, std::size_t start, bool has_remainder,
                  std::size_t element_bytes) {
  ChunkUpdate{task.task, start, has_remainder, element_bytes}.check(batch.chunks());
}

#ifdef ZEROTRAIN_OPENSSL

void bind_openssl(nb::module_& m) {
  nb::class_<Sealer>(m, "Sealer", "Encrypts chunks in place with AES-256-GCM; see spill/sealer_openssl.py.")
      .def("__init__",
           [](Sealer* self, std::shared_ptr<Key> key, std::uint64_t first_counter) {
             new (self) Sealer(std::move(key), first_counter);
           },
           nb::arg("key"), nb::kw_only(), nb::arg("first_counter") = 0)
      .def("seal",
           [](Sealer& self, const BoundChunks& batch) {
             const SealedChunks chunks = batch.sealed();
             GilReleased unlocked;
             self.seal(chunks);
           })
      .def("open",
           [](Sealer& self, const BoundChunks& batch) {
             const SealedChunks chunks = batch.sealed();
             GilReleased unlocked;
             return self.open(chunks);
           },
           "Chunks, counted from the batch's first, that failed: zeroed.")
      .def("update",
           [](Sealer& self, const BoundChunks& batch, const BoundTask& task, std::size_t start, bool has_remainder,
              std::size_t element_bytes) {
             const SealedChunks chunks = batch.sealed();
             const ChunkUpdate update{task.task, start, has_remainder, element_bytes};
             GilReleased unlocked;
             return self.update(chunks, update);
           },
           nb::arg("chunks"), nb::arg("task"), nb::kw_only(), nb::arg("start"), nb::arg("has_remainder"),
           nb::arg("element_bytes"))
      .def("close", &Sealer::close);
  m.def("openssl_version", [] { return Cipher::version(); });
  m.def("cipher_contexts_are_guarded", &Cipher::contexts_are_guarded,
        "Whether what OpenSSL derives from a key lives in the key's guarded memory.");
  m.def("aes_gcm_encrypt",
        [](const Key& key, nb::bytes nonce, nb::bytes associated, Buffer data) {
          key.check();
          require(nonce.size() == kNonceBytes, "a nonce has 12 bytes");
          unsigned char tag[kTagBytes];
          Cipher(key.bytes()).encrypt(view(nonce).start, view(associated), data.data(), data.size(), tag);
          return nb::bytes(tag, kTagBytes);
        },
        "In place; the tag. For published test vectors: the spill store never chooses a nonce from Python.");
  m.def("aes_gcm_decrypt",
        [](const Key& key, nb::bytes nonce, nb::bytes associated, Buffer data, nb::bytes tag) {
          key.check();
          require(nonce.size() == kNonceBytes && tag.size() == kTagBytes, "a nonce has 12 bytes, a tag 16");
          return Cipher(key.bytes())
              .decrypt(view(nonce).start, view(associated), data.data(), data.size(), view(tag).start);
        },
        "In place; whether the tag was right.");
}

#else

void bind_openssl(nb::module_& m) {
  m.def("openssl_version", [] { return std::string(); });
}

#endif

}  // namespace

void bind_seal(nb::module_& m) {
  nb::class_<Key>(m, "SpillKey", "32 random bytes in guarded memory, or the given ones (test vectors).")
      .def(nb::new_(&make_key), nb::arg("given") = nb::none())
      .def("view", &key_view, "The bytes where they lie; worthless after wipe().")
      .def("wipe", &Key::wipe);
  nb::class_<BoundChunks>(m, "Chunks", "Consecutive chunks of a record, with what authenticates them.")
      .def("__init__",
           [](BoundChunks* self, Buffer data, Buffer table, nb::bytes context, std::uint32_t record, std::size_t first,
              std::size_t chunk_bytes) {
             require(chunk_bytes > 0, "chunk_bytes must be positive");
             new (self) BoundChunks{std::move(data), std::move(table), std::move(context), record, first, chunk_bytes};
           },
           nb::arg("data").noconvert(), nb::arg("table").noconvert(), nb::kw_only(), nb::arg("context"),
           nb::arg("record"), nb::arg("first"), nb::arg("chunk_bytes"));
  m.def("update_chunks", &update_plain, nb::arg("chunks"), nb::arg("task"), nb::kw_only(), nb::arg("start"),
        nb::arg("has_remainder"), nb::arg("element_bytes"), "Updates chunks that are open, in place, on the module's threads.");
  m.def("check_update", &check_update, nb::arg("chunks"), nb::arg("task"), nb::kw_only(), nb::arg("start"),
        nb::arg("has_remainder"), nb::arg("element_bytes"), "Raises ValueError where update_chunks would.");
  m.def("clear_vector_registers", &clear_vector_registers,
        "Of the calling thread, where a cipher may have left parts of the expanded key.");
  m.def("key_memory", [] { return KeyMemory::shared().describe(); },
        "How the memory of keys is guarded, and what the system refused.");
  bind_openssl(m);
}
