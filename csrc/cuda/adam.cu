// K3: Adam and AdamW over a list of runs of elements in one launch.
#include "adam.hpp"
#include "memory.cuh"

namespace zerotrain {
namespace cuda {
namespace {

// The number of the piece that a block works on.
__device__ __forceinline__ int piece_of(const AdamParams& p, std::uint32_t tile) {
  int low = 0, high = p.num_pieces;  // first_tile[low] <= tile < first_tile[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (p.pieces[middle].first_tile <= tile ? low : high) = middle;
  }
  return low;
}

template <bool Decoupled, class Grad, class Weight>
__device__ __forceinline__ void adam_group(const AdamPiece& piece, std::int64_t i, const AdamScalars& s) {
  using WeightStore = typename Weight::Type::Store;
  WeightStore* weight = static_cast<WeightStore*>(piece.weight) + i;
  Four<float> master, first, second;
  Four<typename Grad::Store> grad;
  Four<std::int16_t> remainder;
  Four<WeightStore> high;
  if constexpr (Weight::kMaster) {
    master.load(piece.master + i);
  } else {
    high.load(weight);
    remainder.load(piece.remainder + i);
  }
  first.load(piece.first + i);
  second.load(piece.second + i);
  grad.load(static_cast<const typename Grad::Store*>(piece.grad) + i);
  Four<WeightStore> new_weight;
  Four<std::int16_t> new_remainder;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float p;
    if constexpr (Weight::kMaster) {
      p = master.at(j);
    } else {
      p = join_halves(high.at(j), remainder.at(j));
    }
    float m = first.at(j), v = second.at(j);
    adam_element<Decoupled>(p, m, v, Grad::widen(grad.at(j)), s);
    first.set(j, m);
    second.set(j, v);
    if constexpr (Weight::kMaster) {
      master.set(j, p);
      if constexpr (Weight::kWeight) new_weight.set(j, Weight::Type::narrow(p));
    } else {
      new_weight.set(j, high_half(p));
      new_remainder.set(j, low_half(p));
    }
  }
  first.store(piece.first + i);
  second.store(piece.second + i);
  if constexpr (Weight::kMaster) {
    master.store(piece.master + i);
  } else {
    new_remainder.store(piece.remainder + i);
  }
  if constexpr (Weight::kWeight) new_weight.store(weight);
}

template <bool Decoupled, class Grad, class Weight>
__device__ __forceinline__ void adam(const AdamParams& p) {
  if (p.found_inf && *p.found_inf != 0.0) return;
  const AdamPiece piece = p.pieces[piece_of(p, blockIdx.x)];
  AdamScalars s = p.scalars[piece.scalars];
  if (p.factor) set_factor(s, *p.factor);
  std::int64_t i =
      kAdamTile * (blockIdx.x - piece.first_tile) + 4 * static_cast<std::int64_t>(threadIdx.x) - piece.shift;
#pragma unroll 1
  for (int turn = 0; turn < kAdamTurns && i < piece.numel; ++turn, i += 4 * kAdamThreads) {
    if (piece.vectors && i >= 0 && i + 4 <= piece.numel) {
      adam_group<Decoupled, Grad, Weight>(piece, i, s);
    } else {
#pragma unroll 1
      for (int j = 0; j < 4; ++j) {
        if (i + j >= 0 && i + j < piece.numel) adam_at<Decoupled, Grad, Weight>(piece, i + j, s);
      }
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace zerotrain

using namespace zerotrain::cuda;

#define ZEROTRAIN_ADAM(name, Decoupled, Grad, Weight)                                                       \
  extern "C" __global__ void __launch_bounds__(kAdamThreads, 4) name(const __grid_constant__ AdamParams p) { \
    adam<Decoupled, Grad, Weight>(p);                                                                       \
  }
#define ZEROTRAIN_ADAM_WEIGHTS(prefix, Decoupled, Grad)               \
  ZEROTRAIN_ADAM(prefix##_none, Decoupled, Grad, NoWeight)            \
  ZEROTRAIN_ADAM(prefix##_f32, Decoupled, Grad, WeightF32)            \
  ZEROTRAIN_ADAM(prefix##_bf16, Decoupled, Grad, WeightBF16)          \
  ZEROTRAIN_ADAM(prefix##_f16, Decoupled, Grad, WeightF16)            \
  ZEROTRAIN_ADAM(prefix##_remainder, Decoupled, Grad, WeightAndRemainder)
ZEROTRAIN_ADAM_WEIGHTS(adam_f32, false, F32)
ZEROTRAIN_ADAM_WEIGHTS(adam_bf16, false, BF16)
ZEROTRAIN_ADAM_WEIGHTS(adamw_f32, true, F32)
ZEROTRAIN_ADAM_WEIGHTS(adamw_bf16, true, BF16)
