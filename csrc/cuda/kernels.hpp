// The kernels of this folder as calls on addresses, for the device (device.cpp) and for the host (host.cpp), which
// computes with the same headers and is what tests and a device's first check compare with.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "adam.hpp"
#include "quantize.hpp"
#include "sum_parts.hpp"
#include "zerotrain/update.hpp"

namespace zerotrain {
namespace cuda {

using Address = std::uintptr_t;

// A rectangle of values that is quantised row by row.
struct Rows {
  Address values;
  Float type;
  std::int64_t rows, row_stride, pieces, piece_stride, piece_numel;
};

// Elements [start, stop) of a unit; every address is that of element `start`, 0 where there is no such array.
struct AdamUnit {
  std::vector<Segment> segments;
  std::size_t start, stop;
  Address master, remainder, first, second, grad, weight;
};

struct AdamCall {
  Rule rule;
  Float grad, weight;
  bool remainder;
  Address factor, found_inf;
};

class Kernels {
 public:
  virtual ~Kernels() = default;

  // `squares` and `workspace` may be 0.
  void sum_parts(Address into, const std::vector<Address>& parts, Float type, std::int64_t numel, float scale,
                 bool overwrite, Address squares, Address workspace, Address stream);
  void quantize(const Rows& rows, Address packed, int bits, Address stream);
  void dequantize(Address packed, Address into, Float type, std::int64_t rows, std::int64_t numel, int bits,
                  Address stream);
  void dequantize_sum(Address packed, Address into, std::int64_t rows, std::int64_t numel, int bits, Address stream);
  void update(const AdamCall& call, const std::vector<AdamUnit>& units, Address stream);

  // Number of launches so far.
  std::atomic<std::int64_t> launches{0};

 protected:
  struct Grid {
    std::int64_t x;
    int y, threads;
  };
  virtual void launch(const std::string& name, const void* params, Grid grid, Address stream) = 0;

 private:
  void run(const std::string& name, const void* params, Grid grid, Address stream);
};

// Doubles that `sum_parts` needs as a workspace, zeros before the first launch on a stream.
std::int64_t sum_workspace(std::int64_t numel);

}  // namespace cuda
}  // namespace zerotrain
