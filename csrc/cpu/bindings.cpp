// The kernels' part of the Python module: typed, zero-copy DLPack arrays in, nothing of torch's headers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "zerotrain/bind.hpp"
#include "zerotrain/isa.hpp"

namespace nb = nanobind;
using namespace zerotrain;

namespace {

using F32 = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using F32Const = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyConst = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Any = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::size_t kBlock = 16384;  // elements a thread takes at once: its streams fit the L2 cache

bool is_bf16(nb::dlpack::dtype type) {
  return type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat) && type.bits == 16;
}

void require(bool ok, const std::string& message) {
  if (!ok) throw nb::value_error(message.c_str());
}

void check_size(const char* name, std::size_t numel, std::size_t expected) {
  require(numel == expected, std::string(name) + " has " + std::to_string(numel) +
                                 " elements, the target has " + std::to_string(expected));
}

template <class Array>
bool bf16_or_f32(const char* name, const Array& array) {
  const bool bf16 = is_bf16(array.dtype());
  require(bf16 || array.dtype() == nb::dtype<float>(),
          std::string(name) + " must be float32 or bfloat16; cast it first");
  return bf16;
}

const Isa& find_isa(const std::string& isa) {
  std::size_t count = 0;
  const Isa* table = available_isas(count);
  if (isa.empty()) return table[0];
  std::string known;
  for (std::size_t i = 0; i < count; ++i) {
    if (isa == table[i].name) return table[i];
    known += (i ? ", " : "") + std::string(table[i].name);
  }
  throw nb::value_error(("isa '" + isa + "' cannot run here; available: " + known).c_str());
}

// The kernels take it that what they write is theirs alone.
void check_apart(const AdamWRange& range) {
  const std::size_t grad_bytes = range.grad_type == GradType::bf16 ? 2 : 4;
  const std::size_t weight_bytes = range.weight_type == WeightType::bf16 ? 2 : 4;
  const struct {
    const char* name;
    const void* data;
    std::size_t bytes;
  } arrays[] = {{"master", range.master, 4 * range.numel},
                {"exp_avg", range.exp_avg, 4 * range.numel},
                {"exp_avg_sq", range.exp_avg_sq, 4 * range.numel},
                {"grad", range.grad, grad_bytes * range.numel},
                {"weight", range.weight, range.weight ? weight_bytes * range.numel : 0}};
  for (const auto& one : arrays) {
    for (const auto& other : arrays) {
      if (&one == &other) break;
      const auto first = reinterpret_cast<std::uintptr_t>(one.data);
      const auto second = reinterpret_cast<std::uintptr_t>(other.data);
      require(first >= second + other.bytes || second >= first + one.bytes,
              std::string("adamw_: ") + other.name + " and " + one.name + " overlap in memory");
    }
  }
}

AdamWRange slice(const AdamWRange& whole, std::size_t start, std::size_t stop) {
  AdamWRange part = whole;
  const std::size_t grad_bytes = whole.grad_type == GradType::bf16 ? 2 : 4;
  const std::size_t weight_bytes = whole.weight_type == WeightType::bf16 ? 2 : 4;
  part.master += start;
  part.exp_avg += start;
  part.exp_avg_sq += start;
  part.grad = static_cast<char*>(whole.grad) + start * grad_bytes;
  if (whole.weight) part.weight = static_cast<char*>(whole.weight) + start * weight_bytes;
  part.numel = stop - start;
  return part;
}

// Calls `work(start, stop)` for blocks of `numel` elements on up to `threads` threads.
template <class Work>
void in_blocks(std::size_t numel, int threads, const Work& work) {
  const std::size_t blocks = (numel + kBlock - 1) / kBlock;
  const std::size_t workers = std::min<std::size_t>(std::max(threads, 1), std::max<std::size_t>(blocks, 1));
  // Taken one by one: where the system refuses a thread, those that run do its blocks as well.
  std::atomic<std::size_t> next{0};
  auto take = [&] {
    for (std::size_t block = next++; block < blocks; block = next++) {
      work(block * kBlock, std::min(numel, (block + 1) * kBlock));
    }
  };
  std::vector<std::thread> pool;
  pool.reserve(workers - 1);
  try {
    for (std::size_t worker = 1; worker < workers; ++worker) pool.emplace_back(take);
  } catch (const std::system_error&) {
  }
  take();
  for (auto& thread : pool) thread.join();
}

AdamWScalars derive(double lr, double beta1, double beta2, double eps, double weight_decay, int step,
                    double grad_scale, bool decoupled) {
  const double bias1 = 1.0 - std::pow(beta1, step);
  const double bias2 = 1.0 - std::pow(beta2, step);
  AdamWScalars scalars;
  scalars.keep = static_cast<float>(1.0 - lr * weight_decay);
  scalars.weight_decay = static_cast<float>(weight_decay);
  scalars.beta2 = static_cast<float>(beta2);
  scalars.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  scalars.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  scalars.step_size = static_cast<float>(lr / bias1);
  scalars.inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias2));
  scalars.eps = static_cast<float>(eps);
  scalars.grad_scale = static_cast<float>(grad_scale);
  scalars.decoupled = decoupled;
  return scalars;
}

void adamw(F32 master, F32 exp_avg, F32 exp_avg_sq, Any grad, nb::object weight_or_none, double lr, double beta1,
           double beta2, double eps, double weight_decay, int step, double grad_scale, bool decoupled, bool clear_grad,
           int threads, const std::string& isa) {
  const std::size_t numel = master.size();
  check_size("adamw_: exp_avg", exp_avg.size(), numel);
  check_size("adamw_: exp_avg_sq", exp_avg_sq.size(), numel);
  check_size("adamw_: grad", grad.size(), numel);
  require(step >= 1, "adamw_: step must be at least 1; got " + std::to_string(step));
  AdamWRange range{master.data(), exp_avg.data(), exp_avg_sq.data(), grad.data(), nullptr, numel,
                   bf16_or_f32("adamw_: grad", grad) ? GradType::bf16 : GradType::f32, WeightType::none,
                   clear_grad};
  Any weight;
  if (!weight_or_none.is_none()) {
    require(nb::try_cast(weight_or_none, weight, false), "adamw_: weight must be a contiguous 1-D array on the CPU");
    check_size("adamw_: weight", weight.size(), numel);
    range.weight = weight.data();
    range.weight_type = bf16_or_f32("adamw_: weight", weight) ? WeightType::bf16 : WeightType::f32;
  }
  check_apart(range);
  const AdamWScalars scalars =
      derive(lr, beta1, beta2, eps, weight_decay, step, grad_scale, decoupled);
  const AdamWKernel kernel = find_isa(isa).adamw;
  nb::gil_scoped_release unlocked;
  in_blocks(numel, threads,
            [&](std::size_t start, std::size_t stop) { kernel(slice(range, start, stop), scalars); });
}

void accumulate(F32 into, const std::vector<AnyConst>& parts, double scale, bool overwrite, int threads,
                const std::string& isa) {
  require(!parts.empty(), "accumulate_: parts is empty");
  const bool bf16 = bf16_or_f32("accumulate_: a part", parts[0]);
  std::vector<const char*> starts;
  for (const AnyConst& part : parts) {
    check_size("accumulate_: a part", part.size(), into.size());
    require(bf16_or_f32("accumulate_: a part", part) == bf16, "accumulate_: parts differ in dtype");
    starts.push_back(static_cast<const char*>(part.data()));
  }
  float* target = into.data();
  const std::size_t numel = into.size(), width = bf16 ? 2 : 4;
  const AccumulateKernel kernel = find_isa(isa).accumulate;
  nb::gil_scoped_release unlocked;
  in_blocks(numel, threads, [&](std::size_t start, std::size_t stop) {
    std::vector<const void*> moved;
    for (const char* part : starts) moved.push_back(part + start * width);
    kernel({target + start, moved.data(), moved.size(), stop - start, static_cast<float>(scale),
            bf16 ? PartType::bf16 : PartType::f32, overwrite});
  });
}

double sum_squares(F32Const values, int threads, const std::string& isa) {
  const std::size_t numel = values.size();
  const float* start_of_all = values.data();
  std::vector<double> sums((numel + kBlock - 1) / kBlock);
  const SumSquaresKernel kernel = find_isa(isa).sum_squares;
  nb::gil_scoped_release unlocked;
  in_blocks(numel, threads, [&](std::size_t start, std::size_t stop) {
    sums[start / kBlock] = kernel(start_of_all + start, stop - start);
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
  // noconvert: nanobind would hand a copy of another dtype or stride over, and writes would be lost in it.
  m.def("adamw_", &adamw, nb::arg("master").noconvert(), nb::arg("exp_avg").noconvert(),
        nb::arg("exp_avg_sq").noconvert(), nb::arg("grad").noconvert(), nb::arg("weight").none(), nb::kw_only(),
        nb::arg("lr"), nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"), nb::arg("weight_decay"), nb::arg("step"),
        nb::arg("grad_scale") = 1.0, nb::arg("decoupled") = true, nb::arg("clear_grad") = false,
        nb::arg("threads") = 1, nb::arg("isa") = "",
        "One AdamW step in place over 1-D arrays of equal size; the trailing underscore: master, exp_avg,\n"
        "exp_avg_sq and weight are written, and grad is zeroed with clear_grad.");
  m.def("accumulate_", &accumulate, nb::arg("into").noconvert(), nb::arg("parts").noconvert(),
        nb::arg("scale"), nb::kw_only(), nb::arg("overwrite") = false, nb::arg("threads") = 1, nb::arg("isa") = "",
        "into (+)= scale * each part, in the order of the parts; with overwrite from zero. 1-D arrays of equal size.");
  m.def("sum_squares", &sum_squares, nb::arg("values").noconvert(), nb::kw_only(), nb::arg("threads") = 1,
        nb::arg("isa") = "",
        "Sum of squares of a 1-D float32 array, in float64.");
}
