// Block quantisation of one value and of one block's scale, as zero/quantize.py: codes of 8 or 4 bits, an fp32 scale
// for every 256 elements; a block with a value that is not finite decodes to NaN.
#pragma once

#include "element.hpp"

namespace zerotrain {
namespace cuda {

constexpr int kQuantizeBlock = 256;   // elements with one scale: one warp, eight elements a lane
constexpr int kQuantizeThreads = 256;
constexpr int kWarps = kQuantizeThreads / 32;
constexpr int kBlocksOfWarp = 4;      // blocks of elements that a warp works on, one or two at a time

template <int Bits>
constexpr int kLargest = (1 << (Bits - 1)) - 1;

// Rows of values, each packed apart: its codes, then its scales. A row is `pieces` runs of `piece_blocks` blocks.
struct QuantizeParams {
  const void* values;
  std::uint8_t* packed;
  std::int64_t row_stride, piece_stride;  // in elements
  std::int64_t row_blocks, piece_blocks;
  std::int32_t pieces;
  std::int32_t first;  // number of the first (row, piece) of the launch
  bool vectors;  // whether values may be accessed by 16 bytes
  bool wide;     // whether codes may be accessed by 8 bytes
};

// Packed rows, one behind the other, to rows of values or to one row, their sum.
struct DequantizeParams {
  const std::uint8_t* packed;
  void* into;
  std::int64_t row_blocks;
  std::int32_t rows;
  std::int32_t first;  // number of the first row of the launch
  bool vectors, wide;  // as above
};

template <int Bits>
ZEROTRAIN_BOTH std::int64_t row_bytes(std::int64_t blocks) {
  return blocks * (kQuantizeBlock * Bits / 8 + 4);
}

template <int Bits>
ZEROTRAIN_BOTH std::int64_t code_bytes(std::int64_t blocks) {
  return blocks * (kQuantizeBlock * Bits / 8);
}

// The magnitude as an integer that orders like it; NaN is above all.
ZEROTRAIN_BOTH std::uint32_t magnitude(float value) { return bits_of(value) & 0x7fffffffu; }

template <int Bits>
ZEROTRAIN_BOTH float scale_of(std::uint32_t largest_magnitude) {
  return canonical(div(float_of(largest_magnitude), static_cast<float>(kLargest<Bits>)));
}

ZEROTRAIN_BOTH float divisor_of(float scale) { return scale > 0.0f ? scale : 1.0f; }

// The code by definition: the quotient, not finite as 0, rounded half to even, at most the largest code.
template <int Bits>
ZEROTRAIN_BOTH std::int32_t slow_code(float value, float divisor) {
  const float quotient = div(value, divisor);
  if (!(magnitude(quotient) < 0x7f800000u)) return 0;
  const float limit = static_cast<float>(kLargest<Bits>);
  const float cut = quotient > limit ? limit : quotient < -limit ? -limit : quotient;
  return static_cast<std::int32_t>(bits_of(add(cut, 0x1.8p23f)) - 0x4b400000u);
}

// Whether `quick_code` may be used: no quotient exceeds the largest code by more than its rounding. Not so where the
// scale is subnormal, and rounds, or NaN.
ZEROTRAIN_BOTH bool allows_quick_codes(float scale) { return scale >= 0x1p-126f || scale == 0.0f; }

// Within 2^-23 of the reciprocal, relatively: codes do not depend on its last bit.
ZEROTRAIN_BOTH float reciprocal_of(float divisor) {
#if defined(__CUDA_ARCH__)
  float found;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(divisor));
  return found;
#else
  return 1.0f / divisor;
#endif
}

// The code by a product with the reciprocal, which differs from the quotient by less than 2^-15, as that is at most 127.
// `is_sure` becomes false where a boundary between two codes is near, and where the value is not finite.
ZEROTRAIN_BOTH std::int32_t quick_code(float value, float reciprocal, bool& is_sure) {
  const float product = mul(value, reciprocal), shifted = add(product, 0x1.8p23f);
  const float away = sub(product, sub(shifted, 0x1.8p23f));
  is_sure = is_sure && float_of(magnitude(away)) < 0x1.fffp-2f;
  return static_cast<std::int32_t>(bits_of(shifted) - 0x4b400000u);
}

// 2^23 plus a byte of a word.
ZEROTRAIN_BOTH float above_2_23(std::uint32_t word, unsigned byte) {
#if defined(__CUDA_ARCH__)
  return float_of(__byte_perm(word, 0x4b000000u, 0x7650u | byte));
#else
  return float_of(0x4b000000u | ((word >> (8 * byte)) & 0xffu));
#endif
}

// The eight codes in two words (int8, with a sign) or one (int4, counted from -8), the first one lowest.
template <int Bits>
ZEROTRAIN_BOTH void code_values(float (&values)[8], const std::uint32_t (&words)[2]) {
  if constexpr (Bits == 8) {
    for (unsigned i = 0; i < 8; ++i) values[i] = sub(above_2_23(words[i / 4] ^ 0x80808080u, i % 4), 0x1p23f + 128.0f);
  } else {
    const std::uint32_t pairs[2] = {words[0] & 0x0f0f0f0fu, (words[0] >> 4) & 0x0f0f0f0fu};
    for (unsigned i = 0; i < 8; ++i) values[i] = sub(above_2_23(pairs[i % 2], i / 2), 0x1p23f + 8.0f);
  }
}

// The same for one code from its bits in memory.
template <int Bits>
ZEROTRAIN_BOTH float decode(std::uint32_t stored, float scale) {
  const std::uint32_t words[2] = {stored, 0};
  float values[8];
  code_values<Bits>(values, words);
  return mul(values[0], scale);
}

// The words of eight codes, as `code_values` takes them.
template <int Bits>
ZEROTRAIN_BOTH void join_codes(std::uint32_t (&words)[2], const std::int32_t (&codes)[8]) {
  words[0] = words[1] = 0;
  for (int i = 0; i < 8; ++i) {
    if constexpr (Bits == 8) {
      words[i / 4] |= (static_cast<std::uint32_t>(codes[i]) & 0xffu) << (8 * (i % 4));
    } else {
      words[0] |= static_cast<std::uint32_t>(codes[i] + 8) << (4 * i);
    }
  }
}

}  // namespace cuda
}  // namespace zerotrain
