// K2: block quantisation. A warp has a block of 256 elements; a lane has elements 4 * lane to 4 * lane + 3 of each half,
// so that values and codes are read and written without gaps.
#include "memory.cuh"
#include "quantize.hpp"

namespace zerotrain {
namespace cuda {
namespace {

constexpr int kHalf = kQuantizeBlock / 2;

// Four elements; without `vectors` one after the other.
template <class Type>
__device__ __forceinline__ void load_values(float (&values)[4], const typename Type::Store* from, bool vectors) {
  if (vectors) {
    Four<typename Type::Store> four;
    four.load(from);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = Type::widen(four.at(j));
  } else {
    for (int j = 0; j < 4; ++j) values[j] = Type::widen(from[j]);
  }
}

template <class Type>
__device__ __forceinline__ void store_values(typename Type::Store* to, const float (&values)[4], bool vectors) {
  if (vectors) {
    Four<typename Type::Store> four;
#pragma unroll
    for (int j = 0; j < 4; ++j) four.set(j, Type::narrow(values[j]));
    four.store(to);
  } else {
    for (int j = 0; j < 4; ++j) to[j] = Type::narrow(values[j]);
  }
}

// The bits of four codes: 32 of int8, 16 of int4, which packed rows hold at such addresses.
template <int Bits>
__device__ __forceinline__ std::uint32_t load_codes(const std::uint8_t* codes, int lane) {
  if constexpr (Bits == 8) return __ldcs(reinterpret_cast<const std::uint32_t*>(codes) + lane);
  return __ldcs(reinterpret_cast<const std::uint16_t*>(codes) + lane);
}

template <int Bits>
__device__ __forceinline__ void store_codes(std::uint8_t* codes, int lane, std::uint32_t joined) {
  if constexpr (Bits == 8) {
    __stcs(reinterpret_cast<std::uint32_t*>(codes) + lane, joined);
  } else {
    __stcs(reinterpret_cast<std::uint16_t*>(codes) + lane, static_cast<std::uint16_t>(joined));
  }
}

template <int Bits>
constexpr int kHalfBytes = kHalf * Bits / 8;

__device__ __forceinline__ std::int64_t first_block() {
  return (static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * kBlocksOfWarp;
}

template <int Bits>
__device__ __forceinline__ void quantize_block(const float (&values)[2][4], std::uint8_t* codes, float* scales,
                                               std::int64_t block, int lane) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 4; ++j) largest = max(largest, magnitude(values[half][j]));
  }
  const float scale = scale_of<Bits>(__reduce_max_sync(0xffffffffu, largest)), divisor = divisor_of(scale);
  const float reciprocal = reciprocal_of(divisor);
  std::int32_t found[2][4];
  bool is_sure = allows_quick_codes(scale);
#pragma unroll
  for (int i = 0; i < 8; ++i) found[i / 4][i % 4] = quick_code(values[i / 4][i % 4], reciprocal, is_sure);
  if (!is_sure) {
#pragma unroll
    for (int i = 0; i < 8; ++i) found[i / 4][i % 4] = slow_code<Bits>(values[i / 4][i % 4], divisor);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    store_codes<Bits>(codes + (2 * block + half) * kHalfBytes<Bits>, lane, join_codes<Bits>(found[half]));
  }
  if (lane == 0) scales[block] = scale;
}

template <int Bits, class Type>
__device__ __forceinline__ void quantize(const QuantizeParams& p) {
  using Store = typename Type::Store;
  const int lane = threadIdx.x % 32, run = p.first + static_cast<int>(blockIdx.y);
  const std::int64_t row = run / p.pieces, piece = run % p.pieces;
  const Store* values = static_cast<const Store*>(p.values) + row * p.row_stride + piece * p.piece_stride + 4 * lane;
  std::uint8_t* codes = p.packed + row * row_bytes<Bits>(p.row_blocks);
  float* scales = reinterpret_cast<float*>(codes + code_bytes<Bits>(p.row_blocks));
  constexpr int kAtOnce = 2;
#pragma unroll
  for (int turn = 0; turn < kBlocksOfWarp; turn += kAtOnce) {
    const std::int64_t block = first_block() + turn;
    float found[kAtOnce][2][4];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (block + k >= p.piece_blocks) break;
      const Store* from = values + (block + k) * kQuantizeBlock;
      load_values<Type>(found[k][0], from, p.vectors);
      load_values<Type>(found[k][1], from + kHalf, p.vectors);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (block + k >= p.piece_blocks) break;
      quantize_block<Bits>(found[k], codes, scales, piece * p.piece_blocks + block + k, lane);
    }
  }
}

template <int Bits>
__device__ __forceinline__ void decode_four(float (&values)[4], std::uint32_t codes, float scale) {
#pragma unroll
  for (int j = 0; j < 4; ++j) values[j] = canonical(decode<Bits>(codes >> (Bits * j), scale));
}

template <int Bits, class Type>
__device__ __forceinline__ void dequantize(const DequantizeParams& p) {
  using Store = typename Type::Store;
  const int lane = threadIdx.x % 32;
  const std::int64_t row = p.first + static_cast<std::int64_t>(blockIdx.y), block = first_block();
  const std::uint8_t* codes = p.packed + row * row_bytes<Bits>(p.row_blocks);
  const float* scales = reinterpret_cast<const float*>(codes + code_bytes<Bits>(p.row_blocks));
  Store* into = static_cast<Store*>(p.into) + row * p.row_blocks * kQuantizeBlock + 4 * lane;
  std::uint32_t found[kBlocksOfWarp][2];
  float scale[kBlocksOfWarp];
#pragma unroll
  for (int k = 0; k < kBlocksOfWarp; ++k) {
    if (block + k >= p.row_blocks) break;
    found[k][0] = load_codes<Bits>(codes + 2 * (block + k) * kHalfBytes<Bits>, lane);
    found[k][1] = load_codes<Bits>(codes + (2 * (block + k) + 1) * kHalfBytes<Bits>, lane);
    scale[k] = __ldg(scales + block + k);
  }
#pragma unroll
  for (int k = 0; k < kBlocksOfWarp; ++k) {
    if (block + k >= p.row_blocks) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[4];
      decode_four<Bits>(values, found[k][half], scale[k]);
      store_values<Type>(into + (block + k) * kQuantizeBlock + half * kHalf, values, p.vectors);
    }
  }
}

// Add `Count` rows' parts of a block to the sums.
template <int Bits, int Count>
__device__ __forceinline__ void add_rows(float (&sums)[2][4], const DequantizeParams& p, int row, std::int64_t block,
                                         int lane) {
  std::uint32_t found[Count][2];
  float scale[Count];
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    const std::uint8_t* codes = p.packed + (row + k) * row_bytes<Bits>(p.row_blocks);
    found[k][0] = load_codes<Bits>(codes + 2 * block * kHalfBytes<Bits>, lane);
    found[k][1] = load_codes<Bits>(codes + (2 * block + 1) * kHalfBytes<Bits>, lane);
    scale[k] = __ldg(reinterpret_cast<const float*>(codes + code_bytes<Bits>(p.row_blocks)) + block);
  }
#pragma unroll
  for (int k = 0; k < Count; ++k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[half][j] = add(sums[half][j], decode<Bits>(found[k][half] >> (Bits * j), scale[k]));
      }
    }
  }
}

template <int Bits>
__device__ __forceinline__ void dequantize_sum(const DequantizeParams& p) {
  const int lane = threadIdx.x % 32;
  for (int turn = 0; turn < kBlocksOfWarp; ++turn) {
    const std::int64_t block = first_block() + turn;
    if (block >= p.row_blocks) break;
    float sums[2][4] = {};
    int row = 0;
    for (; row + 8 <= p.rows; row += 8) add_rows<Bits, 8>(sums, p, row, block, lane);
    for (; row + 2 <= p.rows; row += 2) add_rows<Bits, 2>(sums, p, row, block, lane);
    if (row < p.rows) add_rows<Bits, 1>(sums, p, row, block, lane);
    float* into = static_cast<float*>(p.into) + block * kQuantizeBlock + 4 * lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[half][j] = canonical(sums[half][j]);
      store_values<F32>(into + half * kHalf, sums[half], p.vectors);
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
#define ZEROTRAIN_QUANTIZE(Bits, type, Type)                                                          \
  ZEROTRAIN_KERNEL(quantize##Bits##_##type, QuantizeParams, (quantize<Bits, Type>))                   \
  ZEROTRAIN_KERNEL(dequantize##Bits##_##type, DequantizeParams, (dequantize<Bits, Type>))
ZEROTRAIN_QUANTIZE(8, f32, F32)
ZEROTRAIN_QUANTIZE(8, bf16, BF16)
ZEROTRAIN_QUANTIZE(8, f16, F16)
ZEROTRAIN_QUANTIZE(4, f32, F32)
ZEROTRAIN_QUANTIZE(4, bf16, BF16)
ZEROTRAIN_QUANTIZE(4, f16, F16)
ZEROTRAIN_KERNEL(dequantize_sum8, DequantizeParams, dequantize_sum<8>)
ZEROTRAIN_KERNEL(dequantize_sum4, DequantizeParams, dequantize_sum<4>)
