// The processor's floating-point mode while kernels run: round to nearest, with subnormal numbers. The calling thread
// may have another mode (torch.set_flush_denormal), which the threads of the pool would not share.
#pragma once

#include <cstdint>

namespace zerotrain {

class FloatMode {
 public:
  FloatMode() : saved_(get()) { set(kDefault); }
  ~FloatMode() { set(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  using Word = std::uint32_t;
  static constexpr Word kDefault = 0x1f80;  // every exception masked
  static Word get() { return __builtin_ia32_stmxcsr(); }
  static void set(Word word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word kDefault = 0;
  static Word get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void set(Word word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
  using Word = int;
  static constexpr Word kDefault = 0;
  static Word get() { return 0; }
  static void set(Word) {}
#endif
  Word saved_;
};

}  // namespace zerotrain
