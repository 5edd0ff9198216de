// K1: the sum of received parts in one pass, with the sum of squares of the result.
#include "memory.cuh"
#include "sum_parts.hpp"

namespace zerotrain {
namespace cuda {
namespace {

constexpr std::int64_t kApart = 4 * kSumThreads;  // elements between the groups of a thread

template <class Part, int Count, int Groups>
__device__ __forceinline__ void add_parts(float (&sum)[Groups][4], const SumParams& p, int from, std::int64_t first) {
  using Store = typename Part::Store;
  Four<Store> parts[Groups][Count];
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    const Store* part = static_cast<const Store*>(p.parts[from + k]) + first;
#pragma unroll
    for (int g = 0; g < Groups; ++g) parts[g][k].load(part + g * kApart);
  }
#pragma unroll
  for (int k = 0; k < Count; ++k) {
#pragma unroll
    for (int i = 0; i < 4 * Groups; ++i) {
      float& one = sum[i / 4][i % 4];
      one = add_part(one, Part::widen(parts[i / 4][k].at(i % 4)), p.scale);
    }
  }
}

// Several groups at once where there are few parts, so that enough loads are in flight.
template <class Part, int Groups>
__device__ __forceinline__ void sum_groups(double (&squares)[2], const SumParams& p, std::int64_t first) {
  float sum[Groups][4] = {};
  if (!p.overwrite) {
    Four<float> into[Groups];
#pragma unroll
    for (int g = 0; g < Groups; ++g) into[g].load(p.into + first + g * kApart);
#pragma unroll
    for (int i = 0; i < 4 * Groups; ++i) sum[i / 4][i % 4] = into[i / 4].at(i % 4);
  }
  if constexpr (Groups < 4) {
    int k = 0;
    if constexpr (Groups == 1) {
      for (; k + 8 <= p.count; k += 8) add_parts<Part, 8>(sum, p, k, first);
    }
    for (; k + 4 <= p.count; k += 4) add_parts<Part, 4>(sum, p, k, first);
    if (k + 2 <= p.count) {
      add_parts<Part, 2>(sum, p, k, first);
      k += 2;
    }
    if (k < p.count) add_parts<Part, 1>(sum, p, k, first);
#pragma unroll
    for (int g = 0; g < Groups; ++g) {
      Four<float> into;
#pragma unroll
      for (int j = 0; j < 4; ++j) into.set(j, sum[g][j]);
      into.store(p.into + first + g * kApart);
    }
  }
  if (p.squares) {
#pragma unroll
    for (int i = 0; i < 4 * Groups; ++i) squares[i % 2] = add_square(squares[i % 2], sum[i / 4][i % 4]);
  }
}

template <class Part>
__device__ __forceinline__ float sum_one(const SumParams& p, std::int64_t i) {
  float sum = p.overwrite ? 0.0f : p.into[i];
  for (int k = 0; k < p.count; ++k) {
    sum = add_part(sum, Part::widen(static_cast<const typename Part::Store*>(p.parts[k])[i]), p.scale);
  }
  if (p.count) p.into[i] = sum;
  return sum;
}

// The sum over the block's threads, in one order; valid in thread 0.
__device__ double sum_of_block(double value, double* shared) {
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    __syncthreads();
  }
  return shared[0];
}

// The block that ends last adds the sums of all blocks, in one order, and sets the counter to zero again.
__device__ void finish_squares(const SumParams& p, double squares) {
  __shared__ double shared[kSumThreads];
  __shared__ bool is_last;
  double* sums = p.workspace + 1;
  const double own = sum_of_block(squares, shared);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = own;
    __threadfence();
    is_last = atomicInc(reinterpret_cast<unsigned*>(p.workspace), gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  double total = 0.0;
  for (unsigned block = threadIdx.x; block < gridDim.x; block += kSumThreads) total += __ldcg(sums + block);
  total = sum_of_block(total, shared);
  if (threadIdx.x == 0) *p.squares = total;
}

template <class Part, int Groups>
__device__ __forceinline__ void sum_block(double (&squares)[2], const SumParams& p) {
  std::int64_t first = kApart * p.turns * blockIdx.x + 4 * static_cast<std::int64_t>(threadIdx.x) - p.shift;
  for (int turn = 0; turn < p.turns && first < p.numel; turn += Groups, first += Groups * kApart) {
    if (p.vectors && first >= 0 && turn + Groups <= p.turns && first + (Groups - 1) * kApart + 4 <= p.numel) {
      sum_groups<Part, Groups>(squares, p, first);
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < 4 * Groups && turn + i / 4 < p.turns; ++i) {
      const std::int64_t place = first + i / 4 * kApart + i % 4;
      if (place >= 0 && place < p.numel) squares[0] = add_square(squares[0], sum_one<Part>(p, place));
    }
  }
}

template <class Part>
__device__ __forceinline__ void sum_parts(const SumParams& p) {
  double squares[2] = {0.0, 0.0};
  if (p.count == 0) {
    sum_block<Part, 4>(squares, p);
  } else if (p.count < 8) {
    sum_block<Part, 2>(squares, p);
  } else {
    sum_block<Part, 1>(squares, p);
  }
  if (p.squares) finish_squares(p, squares[0] + squares[1]);
}

}  // namespace
}  // namespace cuda
}  // namespace zerotrain

using namespace zerotrain::cuda;

extern "C" __global__ void __launch_bounds__(kSumThreads, 4) sum_parts_f32(const __grid_constant__ SumParams p) {
  sum_parts<F32>(p);
}

extern "C" __global__ void __launch_bounds__(kSumThreads, 5) sum_parts_bf16(const __grid_constant__ SumParams p) {
  sum_parts<BF16>(p);
}
