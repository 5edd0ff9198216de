// Sum of received parts: into (+)= scale * each part, in their order, as csrc/cpu/sums_kernel.inc.
#pragma once

#include "element.hpp"

namespace zerotrain {
namespace cuda {

constexpr int kMostParts = 64;
constexpr int kSumThreads = 256;
constexpr std::int64_t kMostSumBlocks = 65536;
constexpr int kLeastTurns = 4;  // groups of four elements that a thread sums

// Parameters of one launch. Element `4 * group - shift` is the first of a group of four, so that groups are aligned
// where `vectors` says that all arrays allow it.
struct SumParams {
  float* into;
  const void* parts[kMostParts];
  double* squares;    // sum of squares of the result; null: not computed
  double* workspace;  // a counter, zero between launches, and one sum for each block
  std::int64_t numel;
  std::int32_t count;  // 0: `into` is only read, for its squares
  std::int32_t turns;
  std::int32_t shift;
  float scale;
  bool overwrite, vectors;
};

ZEROTRAIN_BOTH float add_part(float sum, float part, float scale) { return fma(part, scale, sum); }

// The product is exact: 48 bits.
ZEROTRAIN_BOTH double add_square(double sum, float value) {
  const double wide = static_cast<double>(value);
#if defined(__CUDA_ARCH__)
  return __fma_rn(wide, wide, sum);
#else
  return std::fma(wide, wide, sum);
#endif
}

}  // namespace cuda
}  // namespace zerotrain
