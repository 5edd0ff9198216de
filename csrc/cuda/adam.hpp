// Adam and AdamW of one element, with the operations of csrc/cpu/update_kernel.inc in their order.
#pragma once

#include "element.hpp"

namespace zerotrain {
namespace cuda {

constexpr int kAdamThreads = 256;
constexpr int kAdamTurns = 4;                                      // groups of four elements that a thread updates
constexpr std::int64_t kAdamTile = 4 * kAdamTurns * kAdamThreads;  // elements of a block
constexpr int kMostPieces = 44;
constexpr int kMostScalars = 16;

// The part of zerotrain::Scalars that Adam needs.
struct AdamScalars {
  float grad_scale, grad_scale_low, keep, weight_decay, beta2, one_minus_beta1, one_minus_beta2,
      one_minus_beta2_low, step_size, step_size_low, inv_sqrt_bias2, eps;
};

// A run of elements with the same scalars. The master is `master`, or `weight` and `remainder` together.
struct AdamPiece {
  float* master;
  std::int16_t* remainder;
  float* first;
  float* second;
  const void* grad;
  void* weight;
  std::int64_t numel;
  std::uint32_t first_tile;  // number of the piece's first block in the launch
  std::uint8_t scalars, shift, vectors;  // `shift`, `vectors`: as in SumParams
};

// Parameters of one launch, within the 4 KiB that every driver passes.
struct AdamParams {
  const double* factor;     // of the gradients; null: that of the scalars
  const double* found_inf;  // nothing is written where it is not zero; null: never
  std::int32_t num_pieces;
  AdamScalars scalars[kMostScalars];
  AdamPiece pieces[kMostPieces];
};
static_assert(sizeof(AdamParams) <= 4096, "kernel parameters");

// Take the factor of the gradients from a double, as zerotrain::derive does.
ZEROTRAIN_BOTH void set_factor(AdamScalars& s, double factor) {
  s.grad_scale = static_cast<float>(factor);
  s.grad_scale_low = static_cast<float>(factor - static_cast<double>(s.grad_scale));
}

// Update master `p` and moments `m`, `v`. The scaled gradient is known to twice the precision, as g + rest.
template <bool Decoupled>
ZEROTRAIN_BOTH void adam_element(float& p, float& m, float& v, float unscaled, const AdamScalars& s) {
  const float low = mul(unscaled, s.grad_scale_low);
  float g = fma(unscaled, s.grad_scale, low);
  float rest = add(fma(unscaled, s.grad_scale, -g), low);
  if (Decoupled) {
    p = mul(p, s.keep);
  } else {
    const float sum = fma(s.weight_decay, p, g), decay = sub(sum, g);
    const float lost = add(sub(g, sub(sum, decay)), fma(s.weight_decay, p, -decay));
    rest = add(rest, lost);
    g = sum;
  }
  const float moment = fma(s.one_minus_beta1, sub(g, m), m);
  const float square = fma(g, g, mul(add(g, g), rest));
  const float kept = fma(s.one_minus_beta2_low, square, mul(s.beta2, v));
  const float second = fma(s.one_minus_beta2, square, kept);
  const float direction = div(moment, fma(root(second), s.inv_sqrt_bias2, s.eps));
  m = canonical(moment);
  v = canonical(second);
  p = canonical(fma(-s.step_size, direction, fma(-s.step_size_low, direction, p)));
}

ZEROTRAIN_BOTH float join_halves(std::uint16_t high, std::int16_t low) {
  return float_of((static_cast<std::uint32_t>(high) << 16) + static_cast<std::uint32_t>(static_cast<std::int32_t>(low)));
}

// The bf16 half, rounded half up; the remainder then fits 16 bits with a sign.
ZEROTRAIN_BOTH std::uint16_t high_half(float p) {
  return static_cast<std::uint16_t>((bits_of(p) + 0x8000u) >> 16);
}

ZEROTRAIN_BOTH std::int16_t low_half(float p) { return static_cast<std::int16_t>(bits_of(p) & 0xffffu); }

// How a piece keeps its weights. `Master`: whether there is an fp32 master beside them.
struct NoWeight {
  static constexpr bool kMaster = true, kWeight = false;
  using Type = F32;
};
struct WeightF32 {
  static constexpr bool kMaster = true, kWeight = true;
  using Type = F32;
};
struct WeightBF16 {
  static constexpr bool kMaster = true, kWeight = true;
  using Type = BF16;
};
struct WeightF16 {
  static constexpr bool kMaster = true, kWeight = true;
  using Type = F16;
};
struct WeightAndRemainder {
  static constexpr bool kMaster = false, kWeight = true;
  using Type = BF16;
};

// Update element `i` of a piece in memory.
template <bool Decoupled, class Grad, class Weight>
ZEROTRAIN_BOTH void adam_at(const AdamPiece& piece, std::int64_t i, const AdamScalars& s) {
  using WeightStore = typename Weight::Type::Store;
  WeightStore* weight = static_cast<WeightStore*>(piece.weight);
  const float grad = Grad::widen(static_cast<const typename Grad::Store*>(piece.grad)[i]);
  float p;
  if constexpr (Weight::kMaster) {
    p = piece.master[i];
  } else {
    p = join_halves(weight[i], piece.remainder[i]);
  }
  float m = piece.first[i], v = piece.second[i];
  adam_element<Decoupled>(p, m, v, grad, s);
  piece.first[i] = m;
  piece.second[i] = v;
  if constexpr (Weight::kMaster) {
    piece.master[i] = p;
    if constexpr (Weight::kWeight) weight[i] = Weight::Type::narrow(p);
  } else {
    weight[i] = high_half(p);
    piece.remainder[i] = low_half(p);
  }
}

}  // namespace cuda
}  // namespace zerotrain
