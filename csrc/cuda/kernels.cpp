// Parameters and grids of the launches, the same for device and host.
#include "kernels.hpp"

#include <algorithm>
#include <stdexcept>

namespace zerotrain {
namespace cuda {
namespace {

constexpr std::int64_t kMostRows = 65535;  // of a grid

std::int64_t over(std::int64_t numel, std::int64_t by) { return (numel + by - 1) / by; }

const char* name_of(Float type) {
  switch (type) {
    case Float::f32:
      return "f32";
    case Float::bf16:
      return "bf16";
    case Float::f16:
      return "f16";
    case Float::none:
      return "none";
  }
  return "";
}

// Whether an array of elements of `width` bytes allows vectors of four, with `shift` elements before its first one.
bool fits(Address address, std::size_t width, unsigned shift) {
  return address == 0 || (address % width == 0 && address / width % 4 == shift);
}

// Whether rows at these distances in elements may be accessed by 16 bytes.
bool by_16(Address address, std::size_t width, std::int64_t stride, std::int64_t other) {
  return address % 16 == 0 && stride * width % 16 == 0 && other * width % 16 == 0;
}

// Whether packed rows may be accessed by 8 bytes.
bool by_8(Address packed, std::int64_t row_blocks, int bits) {
  return packed % 8 == 0 && row_blocks * (kQuantizeBlock * bits / 8 + 4) % 8 == 0;
}

unsigned shift_of(Address address) { return static_cast<unsigned>(address / 4 % 4); }

std::int64_t sum_groups(std::int64_t numel) { return numel / 4 + 2; }  // wherever the first group begins

std::int64_t sum_turns(std::int64_t numel) {
  return std::max<std::int64_t>(kLeastTurns, over(sum_groups(numel), kMostSumBlocks * kSumThreads));
}

std::int64_t sum_blocks(std::int64_t numel) { return over(sum_groups(numel), sum_turns(numel) * kSumThreads); }

AdamScalars scalars_of(const Scalars& s) {
  return {s.grad_scale,          s.grad_scale_low, s.keep,          s.weight_decay,   s.beta2, s.one_minus_beta1,
          s.one_minus_beta2, s.one_minus_beta2_low, s.step_size, s.step_size_low, s.inv_sqrt_bias2, s.eps};
}

AdamPiece piece_of(const AdamUnit& unit, const AdamCall& call, std::size_t low, std::size_t high) {
  const std::size_t by = low - unit.start, grad = width(call.grad), weight = width(call.weight);
  const auto at = [by](Address address, std::size_t size) { return address ? address + by * size : 0; };
  const Address first = at(unit.first, 4), second = at(unit.second, 4), master = at(unit.master, 4),
                remainder = at(unit.remainder, 2), grads = at(unit.grad, grad), weights = at(unit.weight, weight);
  AdamPiece piece{};
  piece.master = reinterpret_cast<float*>(master);
  piece.remainder = reinterpret_cast<std::int16_t*>(remainder);
  piece.first = reinterpret_cast<float*>(first);
  piece.second = reinterpret_cast<float*>(second);
  piece.grad = reinterpret_cast<const void*>(grads);
  piece.weight = reinterpret_cast<void*>(weights);
  piece.numel = static_cast<std::int64_t>(high - low);
  const unsigned shift = shift_of(first);
  piece.vectors = fits(first, 4, shift) && fits(second, 4, shift) && fits(master, 4, shift) &&
                  fits(remainder, 2, shift) && fits(grads, grad, shift) && fits(weights, weight ? weight : 1, shift);
  piece.shift = static_cast<std::uint8_t>(piece.vectors ? shift : 0);
  return piece;
}

// Pieces and scalars of the next launch.
struct AdamTable {
  AdamParams params{};
  int num_scalars = 0;
  std::int64_t tiles = 0;

  // Whether there is room for a piece with these scalars.
  bool add(AdamPiece piece, const AdamScalars& scalars) {
    int found = 0;
    while (found < num_scalars && std::memcmp(&params.scalars[found], &scalars, sizeof scalars) != 0) ++found;
    const std::int64_t more = over(piece.numel + piece.shift, kAdamTile);
    if (found == kMostScalars || params.num_pieces == kMostPieces || tiles + more > INT32_MAX) return false;
    if (found == num_scalars) params.scalars[num_scalars++] = scalars;
    piece.scalars = static_cast<std::uint8_t>(found);
    piece.first_tile = static_cast<std::uint32_t>(tiles);
    params.pieces[params.num_pieces++] = piece;
    tiles += more;
    return true;
  }
};

}  // namespace

std::int64_t sum_workspace(std::int64_t numel) { return 1 + sum_blocks(numel); }

void Kernels::run(const std::string& name, const void* params, Grid grid, Address stream) {
  if (grid.x > INT32_MAX) throw std::length_error(name + ": more elements than one launch can have");
  launch(name, params, grid, stream);
  ++launches;
}

void Kernels::sum_parts(Address into, const std::vector<Address>& parts, Float type, std::int64_t numel, float scale,
                        bool overwrite, Address squares, Address workspace, Address stream) {
  if (numel == 0 && !squares) return;
  const unsigned shift = shift_of(into);
  std::size_t done = 0;
  do {
    SumParams p{};
    p.into = reinterpret_cast<float*>(into);
    p.numel = numel;
    p.count = static_cast<std::int32_t>(std::min<std::size_t>(kMostParts, parts.size() - done));
    p.vectors = fits(into, 4, shift);
    for (int k = 0; k < p.count; ++k) {
      p.parts[k] = reinterpret_cast<const void*>(parts[done + k]);
      p.vectors = p.vectors && fits(parts[done + k], width(type), shift);
    }
    p.shift = p.vectors ? static_cast<std::int32_t>(shift) : 0;
    p.turns = static_cast<std::int32_t>(sum_turns(numel));
    p.scale = scale;
    p.overwrite = overwrite && done == 0;
    done += p.count;
    if (done == parts.size()) {
      p.squares = reinterpret_cast<double*>(squares);
      p.workspace = reinterpret_cast<double*>(workspace);
    }
    run(std::string("sum_parts_") + name_of(type), &p, {sum_blocks(numel), 1, kSumThreads}, stream);
  } while (done < parts.size());
}

void Kernels::quantize(const Rows& rows, Address packed, int bits, Address stream) {
  QuantizeParams p{};
  p.values = reinterpret_cast<const void*>(rows.values);
  p.packed = reinterpret_cast<std::uint8_t*>(packed);
  p.row_stride = rows.row_stride;
  p.piece_stride = rows.piece_stride;
  p.piece_blocks = rows.piece_numel / kQuantizeBlock;
  p.row_blocks = rows.pieces * p.piece_blocks;
  p.pieces = static_cast<std::int32_t>(rows.pieces);
  p.vectors = by_16(rows.values, width(rows.type), rows.row_stride, rows.piece_stride);
  p.wide = by_8(packed, p.row_blocks, bits);
  const std::int64_t runs = p.row_blocks ? rows.rows * rows.pieces : 0;
  for (std::int64_t first = 0; first < runs; first += kMostRows) {
    p.first = static_cast<std::int32_t>(first);
    const Grid grid{over(p.piece_blocks, kWarps * kBlocksOfWarp), static_cast<int>(std::min(kMostRows, runs - first)),
                    kQuantizeThreads};
    run("quantize" + std::to_string(bits) + "_" + name_of(rows.type), &p, grid, stream);
  }
}

void Kernels::dequantize(Address packed, Address into, Float type, std::int64_t rows, std::int64_t numel, int bits,
                         Address stream) {
  DequantizeParams p{};
  p.packed = reinterpret_cast<const std::uint8_t*>(packed);
  p.into = reinterpret_cast<void*>(into);
  p.row_blocks = numel / kQuantizeBlock;
  p.rows = static_cast<std::int32_t>(rows);
  p.vectors = by_16(into, width(type), 0, 0);
  p.wide = by_8(packed, p.row_blocks, bits);
  for (std::int64_t first = 0; p.row_blocks && first < rows; first += kMostRows) {
    p.first = static_cast<std::int32_t>(first);
    const Grid grid{over(p.row_blocks, kWarps * kBlocksOfWarp), static_cast<int>(std::min(kMostRows, rows - first)),
                    kQuantizeThreads};
    run("dequantize" + std::to_string(bits) + "_" + name_of(type), &p, grid, stream);
  }
}

void Kernels::dequantize_sum(Address packed, Address into, std::int64_t rows, std::int64_t numel, int bits,
                             Address stream) {
  DequantizeParams p{};
  p.packed = reinterpret_cast<const std::uint8_t*>(packed);
  p.into = reinterpret_cast<void*>(into);
  p.row_blocks = numel / kQuantizeBlock;
  p.rows = static_cast<std::int32_t>(rows);
  p.vectors = by_16(into, 4, 0, 0);
  p.wide = by_8(packed, p.row_blocks, bits);
  if (p.row_blocks == 0) return;
  run("dequantize_sum" + std::to_string(bits), &p, {over(p.row_blocks, kWarps * kBlocksOfWarp), 1, kQuantizeThreads},
      stream);
}

void Kernels::update(const AdamCall& call, const std::vector<AdamUnit>& units, Address stream) {
  const std::string name = std::string(call.rule == Rule::adamw ? "adamw_" : "adam_") + name_of(call.grad) + "_" +
                           (call.remainder ? "remainder" : name_of(call.weight));
  AdamTable table;
  const auto flush = [&] {
    if (table.params.num_pieces == 0) return;
    table.params.factor = reinterpret_cast<const double*>(call.factor);
    table.params.found_inf = reinterpret_cast<const double*>(call.found_inf);
    run(name, &table.params, {table.tiles, 1, kAdamThreads}, stream);
    table = AdamTable();
  };
  for (const AdamUnit& unit : units) {
    for (const Segment& segment : unit.segments) {
      const std::size_t low = std::max(segment.start, unit.start), high = std::min(segment.stop, unit.stop);
      if (low >= high) continue;
      const AdamPiece piece = piece_of(unit, call, low, high);
      const AdamScalars scalars = scalars_of(segment.scalars);
      if (table.add(piece, scalars)) continue;
      flush();
      if (!table.add(piece, scalars)) throw std::length_error(name + ": more elements than one launch can have");
    }
  }
  flush();
}

}  // namespace cuda
}  // namespace zerotrain
