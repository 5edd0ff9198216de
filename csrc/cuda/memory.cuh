// Loads and stores of four elements at once, for addresses that are multiples of their size.
#pragma once

#include "element.hpp"

namespace zerotrain {
namespace cuda {

template <class Store>
struct Four;

template <>
struct Four<float> {
  float4 raw;
  __device__ __forceinline__ void load(const float* from) { raw = __ldcs(reinterpret_cast<const float4*>(from)); }
  __device__ __forceinline__ void store(float* to) const { __stcs(reinterpret_cast<float4*>(to), raw); }
  __device__ __forceinline__ float at(int j) const { return j == 0 ? raw.x : j == 1 ? raw.y : j == 2 ? raw.z : raw.w; }
  __device__ __forceinline__ void set(int j, float x) { (j == 0 ? raw.x : j == 1 ? raw.y : j == 2 ? raw.z : raw.w) = x; }
};

// Two elements of 16 bits in each word, the first one low.
template <>
struct Four<std::uint16_t> {
  uint2 raw = {0, 0};
  __device__ __forceinline__ void load(const std::uint16_t* from) { raw = __ldcs(reinterpret_cast<const uint2*>(from)); }
  __device__ __forceinline__ void store(std::uint16_t* to) const { __stcs(reinterpret_cast<uint2*>(to), raw); }
  __device__ __forceinline__ std::uint16_t at(int j) const {
    return static_cast<std::uint16_t>((j < 2 ? raw.x : raw.y) >> (16 * (j & 1)));
  }
  // Once for each `j`, on zeros.
  __device__ __forceinline__ void set(int j, std::uint16_t x) {
    (j < 2 ? raw.x : raw.y) |= static_cast<std::uint32_t>(x) << (16 * (j & 1));
  }
};

template <>
struct Four<std::int16_t> {
  Four<std::uint16_t> four;
  __device__ __forceinline__ void load(const std::int16_t* from) {
    four.load(reinterpret_cast<const std::uint16_t*>(from));
  }
  __device__ __forceinline__ void store(std::int16_t* to) const { four.store(reinterpret_cast<std::uint16_t*>(to)); }
  __device__ __forceinline__ std::int16_t at(int j) const { return static_cast<std::int16_t>(four.at(j)); }
  __device__ __forceinline__ void set(int j, std::int16_t x) { four.set(j, static_cast<std::uint16_t>(x)); }
};

}  // namespace cuda
}  // namespace zerotrain
