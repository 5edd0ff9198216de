// AES-256-GCM through OpenSSL's EVP, with the key and all data derived from it in KeyMemory where possible. Present
// only if the build found OpenSSL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

struct evp_cipher_ctx_st;

namespace zerotrain {

constexpr std::size_t kKeyBytes = 32;
constexpr std::size_t kNonceBytes = 12;
constexpr std::size_t kTagBytes = 16;

struct Bytes {
  const unsigned char* start;
  std::size_t size;
};

// Contexts for one key. Thread-safe: each call takes a context of its own and keeps it for later calls.
class Cipher {
 public:
  // `key` must stay at its address for as long as the cipher lives.
  explicit Cipher(const unsigned char* key);
  ~Cipher();
  Cipher(const Cipher&) = delete;
  Cipher& operator=(const Cipher&) = delete;

  // Works in place; throws std::runtime_error with OpenSSL's reason.
  void encrypt(const unsigned char* nonce, Bytes associated, unsigned char* data, std::size_t size, unsigned char* tag);
  // Works in place; returns false if the tag does not match the data, whose bytes are then worthless.
  bool decrypt(const unsigned char* nonce, Bytes associated, unsigned char* data, std::size_t size,
               const unsigned char* tag);
  // Contexts in libcrypto's ordinary memory do not outlive a batch: they are cleansed and freed here.
  void end_batch();
  // Frees every context; a forked child forgets them, as their memory no longer has libcrypto's content.
  void drop(bool in_owner);

  static std::string version();
  // Whether contexts are in KeyMemory.
  static bool contexts_are_guarded();

 private:
  evp_cipher_ctx_st* take(bool encrypts);
  void give(bool encrypts, evp_cipher_ctx_st* context);

  const unsigned char* key_;
  std::mutex lock_;
  std::vector<evp_cipher_ctx_st*> idle_[2];
};

}  // namespace zerotrain
