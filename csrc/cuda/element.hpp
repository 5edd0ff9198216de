// What the kernels of this folder compute with, compiled by nvcc for the device and by g++ for the host: exactly
// rounded operations of IEEE 754 and explicit fused multiply-adds alone, so that both give the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ZEROTRAIN_BOTH __host__ __device__ __forceinline__
#else
#define ZEROTRAIN_BOTH inline
#endif

namespace zerotrain {
namespace cuda {

ZEROTRAIN_BOTH std::uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

ZEROTRAIN_BOTH float float_of(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

ZEROTRAIN_BOTH float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

ZEROTRAIN_BOTH float sub(float a, float b) { return add(a, -b); }

ZEROTRAIN_BOTH float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

ZEROTRAIN_BOTH float div(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

ZEROTRAIN_BOTH float root(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return std::sqrt(a);
#endif
}

// a * b + c, rounded once.
ZEROTRAIN_BOTH float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// Every NaN becomes the same quiet one.
ZEROTRAIN_BOTH float canonical(float a) { return a == a ? a : float_of(0x7fc00000u); }

ZEROTRAIN_BOTH float widen_bf16(std::uint16_t bits) { return float_of(static_cast<std::uint32_t>(bits) << 16); }

// Round to nearest, ties to even. `x` is no NaN other than the canonical one.
ZEROTRAIN_BOTH std::uint16_t narrow_bf16(float x) {
  const std::uint32_t bits = bits_of(x);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

ZEROTRAIN_BOTH float widen_f16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) {  // infinity; NaN becomes quiet
    return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13) | (rest > 0x7c00u ? 0x00400000u : 0u));
  }
  if (rest >= 0x0400u) return float_of(sign | ((rest << 13) + (112u << 23)));
  return float_of(sign | bits_of(mul(static_cast<float>(rest), 0x1p-24f)));  // exact
}

// Round to nearest, ties to even.
ZEROTRAIN_BOTH std::uint16_t narrow_f16(float x) {
  const std::uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
  if (rest >= 0x47800000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65536 and more
  if (rest >= 0x38800000u) {  // a normal number of fp16; 65520 and more carry to infinity
    return static_cast<std::uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
  }
  // Subnormal: the addition rounds at 2^-24, the last place of 0.5.
  return static_cast<std::uint16_t>(sign | (bits_of(add(float_of(rest), 0.5f)) - 0x3f000000u));
}

// Element types of arrays: `Store` in memory, widened to and rounded from fp32.
struct F32 {
  using Store = float;
  ZEROTRAIN_BOTH static float widen(float x) { return x; }
  ZEROTRAIN_BOTH static float narrow(float x) { return x; }
};

struct BF16 {
  using Store = std::uint16_t;
  ZEROTRAIN_BOTH static float widen(std::uint16_t x) { return widen_bf16(x); }
  ZEROTRAIN_BOTH static std::uint16_t narrow(float x) { return narrow_bf16(x); }
};

struct F16 {
  using Store = std::uint16_t;
  ZEROTRAIN_BOTH static float widen(std::uint16_t x) { return widen_f16(x); }
  ZEROTRAIN_BOTH static std::uint16_t narrow(float x) { return narrow_f16(x); }
};

}  // namespace cuda
}  // namespace zerotrain
