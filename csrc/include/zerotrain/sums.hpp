// Sums over gradients: the mean over ranks into an accumulator in fp32 or bf16, and the sum of squares for the norm.
//
// As for the updates (update.hpp), every instruction set, thread count and division of the range gives the same bits:
// elements are added in the order of the parts with one fused multiply-add each, squares in a fixed order of fixed
// blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerotrain {

enum class PartType { f32, bf16 };

// into[i] (+)= scale * (parts[0][i] + parts[1][i] + ...), each part by its own fused multiply-add. An accumulator in bf16
// is rounded once, after the last part: to nearest, ties to even.
struct AccumulateRange {
  void* into;
  const void* const* parts;
  std::size_t count;  // number of parts, at least 1
  std::size_t numel;
  float scale;
  PartType type;  // of the parts
  PartType into_type;
  bool overwrite;  // start from zero instead of from the content of `into`
};

using AccumulateKernel = void (*)(const AccumulateRange&);
using SumSquaresKernel = double (*)(const void* values, PartType type, std::size_t numel);

void accumulate_baseline(const AccumulateRange& range);
void accumulate_avx2(const AccumulateRange& range);
void accumulate_avx512(const AccumulateRange& range);
void accumulate_neon(const AccumulateRange& range);
double sum_squares_baseline(const void* values, PartType type, std::size_t numel);
double sum_squares_avx2(const void* values, PartType type, std::size_t numel);
double sum_squares_avx512(const void* values, PartType type, std::size_t numel);
double sum_squares_neon(const void* values, PartType type, std::size_t numel);

}  // namespace zerotrain
