// The kernels of one instruction set, and the sets that this processor runs.
#pragma once

#include <cstddef>

#include "zerotrain/sums.hpp"
#include "zerotrain/update.hpp"

namespace zerotrain {

struct Isa {
  const char* name;
  UpdateKernel update;
  AccumulateKernel accumulate;
  SumSquaresKernel sum_squares;
};

// The instruction sets this processor can run, best first; the baseline is always last.
const Isa* available_isas(std::size_t& count);

}  // namespace zerotrain
