// The host build of what the kernels compute: the headers that nvcc compiles for the device, under plain loops.
#include "host.hpp"

#include <functional>
#include <map>

#include "zerotrain/float_mode.hpp"

namespace zerotrain {
namespace cuda {
namespace {

template <class Part>
void sum_parts(const void* params) {
  const SumParams& p = *static_cast<const SumParams*>(params);
  double squares = 0.0;
  for (std::int64_t i = 0; i < p.numel; ++i) {
    float sum = p.overwrite ? 0.0f : p.into[i];
    for (int k = 0; k < p.count; ++k) {
      sum = add_part(sum, Part::widen(static_cast<const typename Part::Store*>(p.parts[k])[i]), p.scale);
    }
    if (p.count) p.into[i] = sum;
    squares = add_square(squares, sum);
  }
  if (p.squares) *p.squares = squares;
}

template <bool Decoupled, class Grad, class Weight>
void adam(const void* params) {
  const AdamParams& p = *static_cast<const AdamParams*>(params);
  if (p.found_inf && *p.found_inf != 0.0) return;
  for (int k = 0; k < p.num_pieces; ++k) {
    const AdamPiece& piece = p.pieces[k];
    AdamScalars s = p.scalars[piece.scalars];
    if (p.factor) set_factor(s, *p.factor);
    for (std::int64_t i = 0; i < piece.numel; ++i) adam_at<Decoupled, Grad, Weight>(piece, i, s);
  }
}

template <int Bits>
void store_code(std::uint8_t* codes, std::int64_t i, std::int32_t code) {
  if constexpr (Bits == 8) {
    codes[i] = static_cast<std::uint8_t>(code);
  } else {
    const int nibble = code + 8;
    codes[i / 2] = static_cast<std::uint8_t>(i % 2 ? codes[i / 2] | nibble << 4 : nibble);
  }
}

template <int Bits>
std::uint32_t load_code(const std::uint8_t* codes, std::int64_t i) {
  return Bits == 8 ? codes[i] : codes[i / 2] >> (4 * (i % 2));
}

template <int Bits, class Type>
void quantize(const void* params, int runs) {
  const QuantizeParams& p = *static_cast<const QuantizeParams*>(params);
  for (int run = p.first; run < p.first + runs; ++run) {
    const std::int64_t row = run / p.pieces, piece = run % p.pieces;
    const auto* from = static_cast<const typename Type::Store*>(p.values) + row * p.row_stride + piece * p.piece_stride;
    std::uint8_t* codes = p.packed + row * row_bytes<Bits>(p.row_blocks);
    float* scales = reinterpret_cast<float*>(codes + code_bytes<Bits>(p.row_blocks));
    for (std::int64_t block = 0; block < p.piece_blocks; ++block) {
      std::uint32_t largest = 0;
      for (int i = 0; i < kQuantizeBlock; ++i) {
        const std::uint32_t found = magnitude(Type::widen(from[block * kQuantizeBlock + i]));
        largest = found > largest ? found : largest;
      }
      const float scale = scale_of<Bits>(largest), divisor = divisor_of(scale), reciprocal = reciprocal_of(divisor);
      const std::int64_t place = piece * p.piece_blocks + block;
      for (int i = 0; i < kQuantizeBlock; ++i) {
        const float value = Type::widen(from[block * kQuantizeBlock + i]);
        bool is_sure = allows_quick_codes(scale);
        const std::int32_t quick = quick_code(value, reciprocal, is_sure);
        const std::int32_t code = is_sure ? quick : slow_code<Bits>(value, divisor);
        store_code<Bits>(codes, place * kQuantizeBlock + i, code);
      }
      scales[place] = scale;
    }
  }
}

template <int Bits>
float decode_at(const DequantizeParams& p, std::int64_t row, std::int64_t i) {
  const std::uint8_t* codes = p.packed + row * row_bytes<Bits>(p.row_blocks);
  const float* scales = reinterpret_cast<const float*>(codes + code_bytes<Bits>(p.row_blocks));
  return decode<Bits>(load_code<Bits>(codes, i), scales[i / kQuantizeBlock]);
}

template <int Bits, class Type>
void dequantize(const void* params, int rows) {
  const DequantizeParams& p = *static_cast<const DequantizeParams*>(params);
  const std::int64_t numel = p.row_blocks * kQuantizeBlock;
  for (std::int64_t row = p.first; row < p.first + rows; ++row) {
    auto* into = static_cast<typename Type::Store*>(p.into) + row * numel;
    for (std::int64_t i = 0; i < numel; ++i) into[i] = Type::narrow(canonical(decode_at<Bits>(p, row, i)));
  }
}

template <int Bits>
void dequantize_sum(const void* params, int) {
  const DequantizeParams& p = *static_cast<const DequantizeParams*>(params);
  for (std::int64_t i = 0; i < p.row_blocks * kQuantizeBlock; ++i) {
    float sum = 0.0f;
    for (int row = 0; row < p.rows; ++row) sum = add(sum, decode_at<Bits>(p, row, i));
    static_cast<float*>(p.into)[i] = canonical(sum);
  }
}

using Body = std::function<void(const void*, int)>;

template <bool Decoupled, class Grad>
void add_adam(std::map<std::string, Body>& all, const std::string& name) {
  const auto ignoring_rows = [](void (*body)(const void*)) { return [body](const void* p, int) { body(p); }; };
  all[name + "_none"] = ignoring_rows(adam<Decoupled, Grad, NoWeight>);
  all[name + "_f32"] = ignoring_rows(adam<Decoupled, Grad, WeightF32>);
  all[name + "_bf16"] = ignoring_rows(adam<Decoupled, Grad, WeightBF16>);
  all[name + "_f16"] = ignoring_rows(adam<Decoupled, Grad, WeightF16>);
  all[name + "_remainder"] = ignoring_rows(adam<Decoupled, Grad, WeightAndRemainder>);
}

template <int Bits>
void add_quantize(std::map<std::string, Body>& all) {
  const std::string bits = std::to_string(Bits);
  all["quantize" + bits + "_f32"] = quantize<Bits, F32>;
  all["quantize" + bits + "_bf16"] = quantize<Bits, BF16>;
  all["quantize" + bits + "_f16"] = quantize<Bits, F16>;
  all["dequantize" + bits + "_f32"] = dequantize<Bits, F32>;
  all["dequantize" + bits + "_bf16"] = dequantize<Bits, BF16>;
  all["dequantize" + bits + "_f16"] = dequantize<Bits, F16>;
  all["dequantize_sum" + bits] = dequantize_sum<Bits>;
}

std::map<std::string, Body> bodies() {
  std::map<std::string, Body> all;
  all["sum_parts_f32"] = [](const void* p, int) { sum_parts<F32>(p); };
  all["sum_parts_bf16"] = [](const void* p, int) { sum_parts<BF16>(p); };
  add_adam<false, F32>(all, "adam_f32");
  add_adam<false, BF16>(all, "adam_bf16");
  add_adam<true, F32>(all, "adamw_f32");
  add_adam<true, BF16>(all, "adamw_bf16");
  add_quantize<8>(all);
  add_quantize<4>(all);
  return all;
}

class HostKernels : public Kernels {
 protected:
  void launch(const std::string& name, const void* params, Grid grid, Address) override {
    const FloatMode mode;
    bodies_.at(name)(params, grid.y);
  }

 private:
  std::map<std::string, Body> bodies_ = bodies();
};

}  // namespace

std::unique_ptr<Kernels> host_kernels() { return std::make_unique<HostKernels>(); }

}  // namespace cuda
}  // namespace zerotrain
