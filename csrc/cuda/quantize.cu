// K2: block quantisation. A warp has blocks of 256 elements, a lane eight elements of each: with 16-bit values the eight
// from 8 * lane on, with fp32 the four from 4 * lane on in each half, so that values are accessed without gaps.
#include "memory.cuh"
#include "quantize.hpp"

namespace zerotrain {
namespace cuda {
namespace {

constexpr int kHalf = kQuantizeBlock / 2;

// Whether a lane's elements are in two halves.
template <class Type>
constexpr bool kSplit = sizeof(typename Type::Store) == 4;

template <bool Split>
__device__ __forceinline__ int place(int lane, int half) {
  return Split ? half * kHalf + 4 * lane : 8 * lane + 4 * half;
}

template <class Type>
__device__ __forceinline__ void load_values(float (&values)[8], const typename Type::Store* from, int lane,
                                            bool vectors) {
  if (!vectors) {
    for (int i = 0; i < 8; ++i) values[i] = Type::widen(from[place<kSplit<Type>>(lane, i / 4) + i % 4]);
  } else if constexpr (kSplit<Type>) {
    Four<float> four[2];
    four[0].load(from + 4 * lane);
    four[1].load(from + kHalf + 4 * lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = four[i / 4].at(i % 4);
  } else {
    const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(from) + lane);
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = Type::widen(static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2))));
  }
}

template <class Type>
__device__ __forceinline__ void store_values(typename Type::Store* to, const float (&values)[8], int lane,
                                             bool vectors) {
  if (!vectors) {
    for (int i = 0; i < 8; ++i) to[place<kSplit<Type>>(lane, i / 4) + i % 4] = Type::narrow(values[i]);
  } else if constexpr (kSplit<Type>) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* from = values + 4 * half;
      __stcs(reinterpret_cast<float4*>(to + half * kHalf) + lane, make_float4(from[0], from[1], from[2], from[3]));
    }
  } else {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = Type::narrow(values[2 * i]) | static_cast<std::uint32_t>(Type::narrow(values[2 * i + 1])) << 16;
    }
    __stcs(reinterpret_cast<uint4*>(to) + lane, make_uint4(words[0], words[1], words[2], words[3]));
  }
}

// The words of a lane's codes; packed rows begin at multiples of 4 bytes.
template <int Bits, bool Split>
__device__ __forceinline__ void load_codes(std::uint32_t (&words)[2], const std::uint8_t* codes, int lane, bool wide) {
  const auto* whole = reinterpret_cast<const std::uint32_t*>(codes);
  if constexpr (Bits == 8) {
    if (!Split && wide) {
      const uint2 both = __ldcs(reinterpret_cast<const uint2*>(codes) + lane);
      words[0] = both.x;
      words[1] = both.y;
    } else {
      words[0] = __ldcs(whole + place<Split>(lane, 0) / 4);
      words[1] = __ldcs(whole + place<Split>(lane, 1) / 4);
    }
  } else if constexpr (Split) {
    const auto* halves = reinterpret_cast<const std::uint16_t*>(codes);
    words[0] = __ldcs(halves + lane) | static_cast<std::uint32_t>(__ldcs(halves + kHalf / 4 + lane)) << 16;
  } else {
    words[0] = __ldcs(whole + lane);
  }
}

template <int Bits, bool Split>
__device__ __forceinline__ void store_codes(std::uint8_t* codes, const std::uint32_t (&words)[2], int lane, bool wide) {
  auto* whole = reinterpret_cast<std::uint32_t*>(codes);
  if constexpr (Bits == 8) {
    if (!Split && wide) {
      __stcs(reinterpret_cast<uint2*>(codes) + lane, make_uint2(words[0], words[1]));
    } else {
      __stcs(whole + place<Split>(lane, 0) / 4, words[0]);
      __stcs(whole + place<Split>(lane, 1) / 4, words[1]);
    }
  } else if constexpr (Split) {
    auto* halves = reinterpret_cast<std::uint16_t*>(codes);
    __stcs(halves + lane, static_cast<std::uint16_t>(words[0]));
    __stcs(halves + kHalf / 4 + lane, static_cast<std::uint16_t>(words[0] >> 16));
  } else {
    __stcs(whole + lane, words[0]);
  }
}

template <int Bits>
constexpr int kBlockBytes = kQuantizeBlock * Bits / 8;

__device__ __forceinline__ std::int64_t first_block() {
  return (static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * kBlocksOfWarp;
}

// Return the scale, and the words of a lane's codes.
template <int Bits>
__device__ __forceinline__ float quantize_block(std::uint32_t (&words)[2], const float (&values)[8]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, magnitude(values[i]));
  const float scale = scale_of<Bits>(__reduce_max_sync(0xffffffffu, largest)), divisor = divisor_of(scale);
  const float reciprocal = reciprocal_of(divisor);
  std::int32_t codes[8];
  bool is_sure = allows_quick_codes(scale);
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i] = quick_code(values[i], reciprocal, is_sure);
  if (!is_sure) {
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = slow_code<Bits>(values[i], divisor);
  }
  join_codes<Bits>(words, codes);
  return scale;
}

template <int Bits, class Type>
__device__ __forceinline__ void quantize(const QuantizeParams& p) {
  using Store = typename Type::Store;
  const int lane = threadIdx.x % 32, run = p.first + static_cast<int>(blockIdx.y);
  const std::int64_t row = run / p.pieces, piece = run % p.pieces;
  const Store* values = static_cast<const Store*>(p.values) + row * p.row_stride + piece * p.piece_stride;
  std::uint8_t* codes = p.packed + row * row_bytes<Bits>(p.row_blocks);
  float* scales = reinterpret_cast<float*>(codes + code_bytes<Bits>(p.row_blocks)) + piece * p.piece_blocks;
  codes += piece * code_bytes<Bits>(p.piece_blocks);
  constexpr int kAtOnce = 2;
#pragma unroll
  for (int turn = 0; turn < kBlocksOfWarp; turn += kAtOnce) {
    const std::int64_t block = first_block() + turn;
    float found[kAtOnce][8];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (block + k >= p.piece_blocks) break;
      load_values<Type>(found[k], values + (block + k) * kQuantizeBlock, lane, p.vectors);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (block + k >= p.piece_blocks) break;
      std::uint32_t words[2];
      const float scale = quantize_block<Bits>(words, found[k]);
      store_codes<Bits, kSplit<Type>>(codes + (block + k) * kBlockBytes<Bits>, words, lane, p.wide);
      if (lane == 0) scales[block + k] = scale;
    }
  }
}

template <int Bits, class Type>
__device__ __forceinline__ void dequantize(const DequantizeParams& p) {
  using Store = typename Type::Store;
  const int lane = threadIdx.x % 32;
  const std::int64_t row = p.first + static_cast<std::int64_t>(blockIdx.y), block = first_block();
  const std::uint8_t* codes = p.packed + row * row_bytes<Bits>(p.row_blocks);
  const float* scales = reinterpret_cast<const float*>(codes + code_bytes<Bits>(p.row_blocks));
  Store* into = static_cast<Store*>(p.into) + row * p.row_blocks * kQuantizeBlock;
  std::uint32_t words[kBlocksOfWarp][2];
  float scale[kBlocksOfWarp];
#pragma unroll
  for (int k = 0; k < kBlocksOfWarp; ++k) {
    if (block + k >= p.row_blocks) break;
    load_codes<Bits, kSplit<Type>>(words[k], codes + (block + k) * kBlockBytes<Bits>, lane, p.wide);
    scale[k] = __ldg(scales + block + k);
  }
#pragma unroll
  for (int k = 0; k < kBlocksOfWarp; ++k) {
    if (block + k >= p.row_blocks) break;
    float values[8];
    code_values<Bits>(values, words[k]);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = canonical(mul(values[i], scale[k]));
    store_values<Type>(into + (block + k) * kQuantizeBlock, values, lane, p.vectors);
  }
}

// A block of one row after the other; the next one is `step` bytes further.
struct RowCursor {
  const std::uint8_t* codes;
  const std::uint8_t* scale;
  std::int64_t step;
};

// Add the block of the next `Count` rows to the sums.
template <int Bits, int Count>
__device__ __forceinline__ void add_rows(float (&sums)[8], RowCursor& at, int lane, bool wide) {
  std::uint32_t words[Count][2];
  float scale[Count];
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    load_codes<Bits, false>(words[k], at.codes, lane, wide);
    scale[k] = __ldg(reinterpret_cast<const float*>(at.scale));
    at.codes += at.step;
    at.scale += at.step;
  }
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    float values[8];
    code_values<Bits>(values, words[k]);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = add(sums[i], mul(values[i], scale[k]));
  }
}

template <int Bits>
__device__ __forceinline__ void dequantize_sum(const DequantizeParams& p) {
  const int lane = threadIdx.x % 32;
  for (int turn = 0; turn < kBlocksOfWarp; ++turn) {
    const std::int64_t block = first_block() + turn;
    if (block >= p.row_blocks) break;
    RowCursor at{p.packed + block * kBlockBytes<Bits>, p.packed + code_bytes<Bits>(p.row_blocks) + 4 * block,
                 row_bytes<Bits>(p.row_blocks)};
    float sums[8] = {};
    int row = 0;
    for (; row + 8 <= p.rows; row += 8) add_rows<Bits, 8>(sums, at, lane, p.wide);
    for (; row + 2 <= p.rows; row += 2) add_rows<Bits, 2>(sums, at, lane, p.wide);
    if (row < p.rows) add_rows<Bits, 1>(sums, at, lane, p.wide);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = canonical(sums[i]);
    float* into = static_cast<float*>(p.into) + block * kQuantizeBlock + 8 * lane;
    if (p.vectors) {
      __stcs(reinterpret_cast<float4*>(into), make_float4(sums[0], sums[1], sums[2], sums[3]));
      __stcs(reinterpret_cast<float4*>(into) + 1, make_float4(sums[4], sums[5], sums[6], sums[7]));
    } else {
      for (int i = 0; i < 8; ++i) into[i] = sums[i];
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace zerotrain

using namespace zerotrain::cuda;

#define ZEROTRAIN_KERNEL(name, Params, body)                                                                 \
  extern "C" __global__ void __launch_bounds__(kQuantizeThreads, 4) name(const __grid_constant__ Params p) { \
    body(p);                                                                                                 \
  }
#define ZEROTRAIN_QUANTIZE(Bits, type, Type)                                        \
  ZEROTRAIN_KERNEL(quantize##Bits##_##type, QuantizeParams, (quantize<Bits, Type>)) \
  ZEROTRAIN_KERNEL(dequantize##Bits##_##type, DequantizeParams, (dequantize<Bits, Type>))
ZEROTRAIN_QUANTIZE(8, f32, F32)
ZEROTRAIN_QUANTIZE(8, bf16, BF16)
ZEROTRAIN_QUANTIZE(8, f16, F16)
ZEROTRAIN_QUANTIZE(4, f32, F32)
ZEROTRAIN_QUANTIZE(4, bf16, BF16)
ZEROTRAIN_QUANTIZE(4, f16, F16)
ZEROTRAIN_KERNEL(dequantize_sum8, DequantizeParams, dequantize_sum<8>)
ZEROTRAIN_KERNEL(dequantize_sum4, DequantizeParams, dequantize_sum<4>)
