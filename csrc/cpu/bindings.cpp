// The kernels' part of the Python module: typed, zero-copy DLPack arrays as inputs, and no header of torch.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <vector>

#include "zerotrain/arrays.hpp"
#include "zerotrain/bind.hpp"
#include "zerotrain/bind_update.hpp"
#include "zerotrain/cpu_budget.hpp"
#include "zerotrain/float_mode.hpp"
#include "zerotrain/gil.hpp"
#include "zerotrain/thread_pool.hpp"

namespace nb = nanobind;
using namespace zerotrain;

namespace {

// Call `work(start, stop)` for blocks of `numel` elements on up to `threads` threads; 0 means as many as the process
// may use.
template <class Work>
void in_blocks(std::size_t numel, int threads, const Work& work) {
  const auto one = [&](std::size_t block) {
    const FloatMode mode;
    work(block * kBlock, std::min(numel, (block + 1) * kBlock));
  };
  ThreadPool::shared().run((numel + kBlock - 1) / kBlock, one, static_cast<std::size_t>(std::max(threads, 0)));
}

bool bf16_or_f32(const char* name, nb::dlpack::dtype type) {
  const Float found = float_type(name, type);
  require(found != Float::f16, std::string(name) + " must be float32 or bfloat16; cast it first");
  return found == Float::bf16;
}

void accumulate(Any into, const std::vector<AnyConst>& parts, double scale, bool overwrite, int threads,
                const std::string& isa) {
  require(!parts.empty(), "accumulate_: parts is empty");
  const bool bf16 = bf16_or_f32("accumulate_: a part", parts[0].dtype());
  const bool narrow = bf16_or_f32("accumulate_: into", into.dtype());
  char* target = static_cast<char*>(into.data());
  const std::size_t numel = into.size(), width = bf16 ? 2 : 4, into_width = narrow ? 2 : 4;
  std::vector<const char*> starts;
  for (const AnyConst& part : parts) {
    check_size("accumulate_: a part", part.size(), numel);
    require(bf16_or_f32("accumulate_: a part", part.dtype()) == bf16, "accumulate_: parts differ in dtype");
    check_apart("accumulate_", {"into", target, into_width * numel}, {"a part", part.data(), width * numel});
    starts.push_back(static_cast<const char*>(part.data()));
  }
  const AccumulateKernel kernel = find_isa(isa).accumulate;
  const GilReleased unlocked;
  in_blocks(numel, threads, [&](std::size_t start, std::size_t stop) {
    std::vector<const void*> moved;
    for (const char* part : starts) moved.push_back(part + start * width);
    kernel({target + start * into_width, moved.data(), moved.size(), stop - start, static_cast<float>(scale),
            bf16 ? PartType::bf16 : PartType::f32, narrow ? PartType::bf16 : PartType::f32, overwrite});
  });
}

double sum_squares(AnyConst values, int threads, const std::string& isa) {
  const std::size_t numel = values.size();
  const bool narrow = bf16_or_f32("sum_squares: values", values.dtype());
  const char* start_of_all = static_cast<const char*>(values.data());
  std::vector<double> sums((numel + kBlock - 1) / kBlock);
  const SumSquaresKernel kernel = find_isa(isa).sum_squares;
  const GilReleased unlocked;
  in_blocks(numel, threads, [&](std::size_t start, std::size_t stop) {
    sums[start / kBlock] = kernel(start_of_all + start * (narrow ? 2 : 4), narrow ? PartType::bf16 : PartType::f32,
                                  stop - start);
  });
  double total = 0.0;
  for (double sum : sums) total += sum;
  return total;
}

std::vector<std::string> isas() {
  std::size_t count = 0;
  const Isa* table = available_isas(count);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < count; ++i) names.emplace_back(table[i].name);
  return names;
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("isas", &isas, "Instruction sets that this processor can run, best first.");
  m.def(
      "num_threads", [] { return ThreadPool::shared().size(); },
      "Threads of the native pool that a call uses unless it passes another number.");
  m.def("num_usable_threads", &num_usable_threads, nb::arg("root") = "",
        "Threads that this process may use by affinity, control groups and its share of the node's ranks.\n"
        "`root` stands for '/'.");
  bind_update(m);
  // noconvert: nanobind would pass a copy of another dtype or stride, and writes into it would be lost.
  m.def("accumulate_", &accumulate, nb::arg("into").noconvert(), nb::arg("parts").noconvert(), nb::arg("scale"),
        nb::kw_only(), nb::arg("overwrite") = false, nb::arg("threads") = 0, nb::arg("isa") = "",
        "into (+)= scale * each part, in the order of the parts; with overwrite from zero. 1-D arrays of equal size;\n"
        "bfloat16 `into` is rounded once.");
  m.def("sum_squares", &sum_squares, nb::arg("values").noconvert(), nb::kw_only(), nb::arg("threads") = 0,
        nb::arg("isa") = "", "Sum of squares of a 1-D float32 or bfloat16 array, in float64.");
}
