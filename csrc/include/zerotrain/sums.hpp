// Sums over gradients: the mean over ranks into an fp32 accumulator, and the sum of squares for the norm.
//
// As for the updates (update.hpp), every instruction set, thread count and division of the range gives the same bits:
// elements are added in the order of the parts with one fused multiply-add each, squares in a fixed order of fixed
// blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerotrain {

enum class PartType { f32, bf16 };

// into[i] (+)= scale * (parts[0][i] + parts[1][i] + ...), each part by its own fused multiply-add.
struct AccumulateRange {
  float* into;
  const void* const* parts;
  std::size_t count;  // number of parts, at least 1
  std::size_t numel;
  float scale;
  PartType type;
  bool overwrite;  // start from zero instead of from the content of `into`
};

using AccumulateKernel = void (*)(const AccumulateRange&);
using SumSquaresKernel = double (*)(const float* values, std::size_t numel);

void accumulate_baseline(const AccumulateRange& range);
void accumulate_avx2(const AccumulateRange& range);
void accumulate_avx512(const AccumulateRange& range);
void accumulate_neon(const AccumulateRange& range);
double sum_squares_baseline(const float* values, std::size_t numel);
double sum_squares_avx2(const float* values, std::size_t numel);
double sum_squares_avx512(const float* values, std::size_t numel);
double sum_squares_neon(const float* values, std::size_t numel);

}  // namespace zerotrain
