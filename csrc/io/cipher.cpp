#include "cipher.hpp"

#ifdef ZEROTRAIN_OPENSSL

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "key_memory.hpp"

namespace zerotrain {

namespace {

[[noreturn]] void fail(const char* what) {
  char reason[256] = "no reason given";
  if (const unsigned long code = ERR_get_error()) ERR_error_string_n(code, reason, sizeof reason);
  ERR_clear_error();
  throw std::runtime_error(std::string("OpenSSL could not ") + what + ": " + reason);
}

#ifdef ZEROTRAIN_OPENSSL_STATIC

// A cipher context holds the expanded key, whose first bytes are the key. While a context is made, this copy of
// libcrypto (linked in statically, its symbols hidden, so that no other library uses it) allocates from KeyMemory.
thread_local bool in_key_memory = false;

void* crypto_malloc(std::size_t bytes, const char*, int) {
  if (!in_key_memory) return std::malloc(bytes);
  try {
    return KeyMemory::shared().allocate(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void crypto_free(void* start, const char*, int) {
  if (start && KeyMemory::shared().owns(start)) return KeyMemory::shared().release(start);
  std::free(start);
}

void* crypto_realloc(void* start, std::size_t bytes, const char* file, int line) {
  if (!start) return crypto_malloc(bytes, file, line);
  if (!KeyMemory::shared().owns(start)) return std::realloc(start, bytes);
  void* moved = nullptr;
  try {
    moved = KeyMemory::shared().allocate(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  std::memcpy(moved, start, std::min(bytes, KeyMemory::shared().size_of(start)));
  KeyMemory::shared().release(start);
  return moved;
}

bool start_library() {
  const bool guarded = CRYPTO_set_mem_functions(crypto_malloc, crypto_realloc, crypto_free) == 1;
  // No handlers at exit, as these would also run in forked children. No configuration file, as it belongs to the
  // host.
  if (!OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT | OPENSSL_INIT_NO_LOAD_CONFIG, nullptr)) fail("start");
  return guarded;
}

struct InKeyMemory {
  InKeyMemory() { in_key_memory = true; }
  ~InKeyMemory() { in_key_memory = false; }
};

#else

// All code of the process shares its libcrypto: its allocator is not ours to set.
bool start_library() { return false; }
struct InKeyMemory {
  InKeyMemory() {}
};

#endif

bool library_is_guarded() {
  static const bool guarded = start_library();
  return guarded;
}

const EVP_CIPHER* algorithm() {
  static const EVP_CIPHER* cipher = [] {
    library_is_guarded();
    const EVP_CIPHER* found = EVP_CIPHER_fetch(nullptr, "AES-256-GCM", nullptr);
    if (!found) fail("provide AES-256-GCM");
    return found;
  }();
  return cipher;
}

int checked_size(std::size_t size) {
  if (size > 0x7fffffff) throw std::runtime_error("a chunk of more than 2 GiB cannot be encrypted at once");
  return static_cast<int>(size);
}

}  // namespace

bool Cipher::contexts_are_guarded() { return library_is_guarded(); }

std::string Cipher::version() { return OpenSSL_version(OPENSSL_VERSION_STRING); }

Cipher::Cipher(const unsigned char* key) : key_(key) { algorithm(); }

Cipher::~Cipher() { drop(true); }

evp_cipher_ctx_st* Cipher::take(bool encrypts) {
  {
    std::lock_guard<std::mutex> guard(lock_);
    if (!idle_[encrypts].empty()) {
      evp_cipher_ctx_st* context = idle_[encrypts].back();
      idle_[encrypts].pop_back();
      return context;
    }
  }
  const EVP_CIPHER* cipher = algorithm();
  const InKeyMemory scope;
  evp_cipher_ctx_st* context = EVP_CIPHER_CTX_new();
  if (!context) fail("make a cipher context");
  if (!EVP_CipherInit_ex(context, cipher, nullptr, key_, nullptr, encrypts)) {
    EVP_CIPHER_CTX_free(context);
    fail("expand the key");
  }
  return context;
}

void Cipher::give(bool encrypts, evp_cipher_ctx_st* context) {
  std::lock_guard<std::mutex> guard(lock_);
  idle_[encrypts].push_back(context);
}

void Cipher::end_batch() {
  if (!contexts_are_guarded()) drop(true);
}

void Cipher::drop(bool in_owner) {
  std::lock_guard<std::mutex> guard(lock_);
  for (auto& idle : idle_) {
    if (in_owner) {
      for (evp_cipher_ctx_st* context : idle) EVP_CIPHER_CTX_free(context);
    }
    idle.clear();
  }
}

void Cipher::encrypt(const unsigned char* nonce, Bytes associated, unsigned char* data, std::size_t size,
                     unsigned char* tag) {
  evp_cipher_ctx_st* context = take(true);
  int written = 0;
  const bool done = EVP_CipherInit_ex(context, nullptr, nullptr, nullptr, nonce, -1) &&
                    EVP_CipherUpdate(context, nullptr, &written, associated.start, checked_size(associated.size)) &&
                    EVP_CipherUpdate(context, data, &written, data, checked_size(size)) &&
                    EVP_CipherFinal_ex(context, data + size, &written) &&
                    EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, kTagBytes, tag);
  give(true, context);
  clear_vector_registers();
  if (!done) fail("encrypt a chunk");
}

bool Cipher::decrypt(const unsigned char* nonce, Bytes associated, unsigned char* data, std::size_t size,
                     const unsigned char* tag) {
  evp_cipher_ctx_st* context = take(false);
  unsigned char expected[kTagBytes];  // EVP_CTRL takes it as writable
  std::memcpy(expected, tag, kTagBytes);
  int written = 0;
  const bool ready = EVP_CipherInit_ex(context, nullptr, nullptr, nullptr, nonce, -1) &&
                     EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, kTagBytes, expected) &&
                     EVP_CipherUpdate(context, nullptr, &written, associated.start, checked_size(associated.size)) &&
                     EVP_CipherUpdate(context, data, &written, data, checked_size(size));
  const bool genuine = ready && EVP_CipherFinal_ex(context, data + size, &written) == 1;
  give(false, context);
  clear_vector_registers();
  if (!ready) fail("decrypt a chunk");
  if (!genuine) ERR_clear_error();
  return genuine;
}

}  // namespace zerotrain

#endif
