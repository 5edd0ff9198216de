// Checks of the arrays that the bindings get.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "zerotrain/isa.hpp"
#include "zerotrain/update.hpp"

namespace zerotrain {

using Any = nanobind::ndarray<nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using AnyConst = nanobind::ndarray<nanobind::ro, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

constexpr std::size_t kBlock = 16384;  // elements that a thread takes at once: its streams fit the L2 cache

inline void require(bool ok, const std::string& message) {
  if (!ok) throw nanobind::value_error(message.c_str());
}

inline void check_size(const std::string& name, std::size_t numel, std::size_t expected) {
  require(numel == expected, name + " has " + std::to_string(numel) + " elements, the target has " +
                                 std::to_string(expected));
}

// Raises ValueError for another type.
inline Float float_type(const std::string& name, nanobind::dlpack::dtype type) {
  if (type == nanobind::dtype<float>()) return Float::f32;
  if (type.lanes == 1 && type.bits == 16) {
    if (type.code == static_cast<std::uint8_t>(nanobind::dlpack::dtype_code::Bfloat)) return Float::bf16;
    if (type.code == static_cast<std::uint8_t>(nanobind::dlpack::dtype_code::Float)) return Float::f16;
  }
  throw nanobind::value_error((name + " must be float32, bfloat16 or float16; cast it first").c_str());
}

inline bool is_of(nanobind::dlpack::dtype type, Float expected) {
  if (type == nanobind::dtype<float>()) return expected == Float::f32;
  const bool is_bf16 = type.lanes == 1 && type.bits == 16 &&
                       type.code == static_cast<std::uint8_t>(nanobind::dlpack::dtype_code::Bfloat);
  return is_bf16 && expected == Float::bf16;
}

// The memory range of one array.
struct Extent {
  std::string name;
  const void* data;
  std::size_t bytes;
};

inline bool overlap(const Extent& one, const Extent& other) {
  const auto first = reinterpret_cast<std::uintptr_t>(one.data);
  const auto second = reinterpret_cast<std::uintptr_t>(other.data);
  return one.bytes && other.bytes && first < second + other.bytes && second < first + one.bytes;
}

inline void check_apart(const std::string& function, const Extent& one, const Extent& other) {
  require(!overlap(one, other), function + ": " + one.name + " and " + other.name +
                                    " overlap in memory; give arrays of their own");
}

inline const Isa& find_isa(const std::string& isa) {
  std::size_t count = 0;
  const Isa* table = available_isas(count);
  if (isa.empty()) return table[0];
  std::string known;
  for (std::size_t i = 0; i < count; ++i) {
    if (isa == table[i].name) return table[i];
    known += (i ? ", " : "") + std::string(table[i].name);
  }
  throw nanobind::value_error(("isa '" + isa + "' cannot run here; available: " + known).c_str());
}

}  // namespace zerotrain
