// K1: the sum of received parts in one pass, with the sum of squares of the result.
#include "memory.cuh"
#include "sum_parts.hpp"

namespace zerotrain {
namespace cuda {
namespace {

template <class Part, int Count>
__device__ __forceinline__ void add_parts(float (&sum)[4], const SumParams& p, int from, std::int64_t first) {
  using Store = typename Part::Store;
  Four<Store> parts[Count];
#pragma unroll
  for (int k = 0; k < Count; ++k) parts[k].load(static_cast<const Store*>(p.parts[from + k]) + first);
#pragma unroll
  for (int k = 0; k < Count; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] = add_part(sum[j], Part::widen(parts[k].at(j)), p.scale);
  }
}

template <class Part>
__device__ __forceinline__ void sum_group(float (&sum)[4], const SumParams& p, std::int64_t first) {
  Four<float> into;
  if (p.overwrite) {
    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
  } else {
    into.load(p.into + first);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] = into.at(j);
  }
  int k = 0;
  for (; k + 8 <= p.count; k += 8) add_parts<Part, 8>(sum, p, k, first);
  if (k + 4 <= p.count) {
    add_parts<Part, 4>(sum, p, k, first);
    k += 4;
  }
  if (k + 2 <= p.count) {
    add_parts<Part, 2>(sum, p, k, first);
    k += 2;
  }
  if (k < p.count) add_parts<Part, 1>(sum, p, k, first);
  if (p.count == 0) return;
#pragma unroll
  for (int j = 0; j < 4; ++j) into.set(j, sum[j]);
  into.store(p.into + first);
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

template <class Part>
__device__ __forceinline__ void sum_parts(const SumParams& p) {
  double squares = 0.0;
  std::int64_t first = 4 * (static_cast<std::int64_t>(blockIdx.x) * p.turns * kSumThreads + threadIdx.x) - p.shift;
  for (int turn = 0; turn < p.turns && first < p.numel; ++turn, first += 4 * kSumThreads) {
    if (p.vectors && first >= 0 && first + 4 <= p.numel) {
      float sum[4];
      sum_group<Part>(sum, p, first);
#pragma unroll
      for (int j = 0; j < 4; ++j) squares = add_square(squares, sum[j]);
    } else {
      for (int j = 0; j < 4; ++j) {
        if (first + j >= 0 && first + j < p.numel) squares = add_square(squares, sum_one<Part>(p, first + j));
      }
    }
  }
  if (p.squares) finish_squares(p, squares);
}

}  // namespace
}  // namespace cuda
}  // namespace zerotrain

using namespace zerotrain::cuda;

extern "C" __global__ void __launch_bounds__(kSumThreads, 6) sum_parts_f32(const __grid_constant__ SumParams p) {
  sum_parts<F32>(p);
}

extern "C" __global__ void __launch_bounds__(kSumThreads, 6) sum_parts_bf16(const __grid_constant__ SumParams p) {
  sum_parts<BF16>(p);
}
