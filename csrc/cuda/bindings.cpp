// The GPU kernels' part of the Python module: calls on addresses, as the memory is the device's.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "device.hpp"
#include "host.hpp"
#include "zerotrain/arrays.hpp"
#include "zerotrain/bind.hpp"
#include "zerotrain/bind_update.hpp"
#include "zerotrain/gil.hpp"

namespace nb = nanobind;
using namespace zerotrain;
using namespace zerotrain::cuda;

namespace {

Float type_of(const std::string& name) {
  if (name == "none") return Float::none;
  if (name == "f32") return Float::f32;
  if (name == "bf16") return Float::bf16;
  if (name == "f16") return Float::f16;
  throw nb::value_error(("dtype '" + name + "' is unknown; there are f32, bf16, f16 and none").c_str());
}

// The calls below release the GIL: a launch waits while the stream's queue is full, which may take until the watchdog's
// thread has ended a collective that hangs.
void check_bits(int bits) { require(bits == 4 || bits == 8, "codes have 4 or 8 bits"); }

void check_blocks(std::int64_t numel) {
  require(numel % kQuantizeBlock == 0, "quantised elements must be a multiple of " + std::to_string(kQuantizeBlock) +
                                           "; got " + std::to_string(numel));
}

void sum_parts(Kernels& self, Address into, const std::vector<Address>& parts, const std::string& dtype,
               std::int64_t numel, double scale, bool overwrite, Address squares, Address workspace, Address stream) {
  const Float type = type_of(dtype);
  require(type == Float::f32 || type == Float::bf16, "sum_parts: parts must be f32 or bf16");
  require(!parts.empty() || !overwrite, "sum_parts: nothing to sum");
  require(!squares || workspace, "sum_parts: squares need a workspace");
  const GilReleased unlocked;
  self.sum_parts(into, parts, type, numel, static_cast<float>(scale), overwrite, squares, workspace, stream);
}

void quantize(Kernels& self, Address values, const std::string& dtype, Address packed, int bits, std::int64_t rows,
              std::int64_t row_stride, std::int64_t pieces, std::int64_t piece_stride, std::int64_t piece_numel,
              Address stream) {
  check_bits(bits);
  check_blocks(piece_numel);
  require(packed % 4 == 0, "quantize: packed rows must start at a multiple of 4 bytes");
  const GilReleased unlocked;
  self.quantize({values, type_of(dtype), rows, row_stride, pieces, piece_stride, piece_numel}, packed, bits, stream);
}

void dequantize(Kernels& self, Address packed, Address into, const std::string& dtype, int bits, std::int64_t rows,
                std::int64_t numel, Address stream) {
  check_bits(bits);
  check_blocks(numel);
  require(packed % 4 == 0, "dequantize: packed rows must start at a multiple of 4 bytes");
  const GilReleased unlocked;
  self.dequantize(packed, into, type_of(dtype), rows, numel, bits, stream);
}

void dequantize_sum(Kernels& self, Address packed, Address into, int bits, std::int64_t rows, std::int64_t numel,
                    Address stream) {
  check_bits(bits);
  check_blocks(numel);
  require(packed % 4 == 0, "dequantize_sum: packed rows must start at a multiple of 4 bytes");
  const GilReleased unlocked;
  self.dequantize_sum(packed, into, rows, numel, bits, stream);
}

void make_unit(AdamUnit* self, const std::string& rule, const std::vector<PySegment>& segments, double grad_scale,
               std::size_t start, std::size_t stop, Address first, Address second, Address grad, Address master,
               Address remainder, Address weight) {
  std::vector<Segment> derived;
  for (const PySegment& segment : segments) {
    derived.push_back({segment.start, segment.stop, derive(rule_of(rule), segment.hyper, grad_scale)});
  }
  new (self) AdamUnit{std::move(derived), start, stop, master, remainder, first, second, grad, weight};
}

void update(Kernels& self, const std::string& rule, const std::vector<AdamUnit>& units, const std::string& grad,
            const std::string& weight, Address factor, Address found_inf, Address stream) {
  const Rule found = rule_of(rule);
  require(found == Rule::adam || found == Rule::adamw, "update: there are kernels for adam and adamw");
  const bool remainder = !units.empty() && units[0].remainder != 0;
  const Float grads = type_of(grad), weights = type_of(weight);
  require(grads == Float::f32 || grads == Float::bf16, "update: gradients must be f32 or bf16");
  require(!remainder || weights == Float::bf16, "update: a remainder belongs to bf16 weights");
  for (const AdamUnit& unit : units) {
    const bool is_whole = unit.first && unit.second && unit.grad && (weights == Float::none || unit.weight);
    const bool empty = unit.start >= unit.stop;
    require(empty || (is_whole && (remainder ? unit.remainder && !unit.master : unit.master && !unit.remainder)),
            "update: a unit lacks an array, or has both a master and a remainder");
  }
  const GilReleased unlocked;
  self.update({found, grads, weights, remainder, factor, found_inf}, units, stream);
}

}  // namespace

void bind_cuda(nb::module_& m) {
  nb::class_<AdamUnit>(m, "AdamUnit",
                       "Elements [start, stop) of a unit that `Kernels.update` updates; addresses are those of element `start`.")
      .def("__init__", &make_unit, nb::arg("rule"), nb::arg("segments"), nb::kw_only(), nb::arg("grad_scale") = 1.0,
           nb::arg("start"), nb::arg("stop"), nb::arg("first"), nb::arg("second"), nb::arg("grad"),
           nb::arg("master") = 0, nb::arg("remainder") = 0, nb::arg("weight") = 0)
      .def_ro("first", &AdamUnit::first);
  nb::class_<Kernels>(m, "Kernels", "The kernels of csrc/cuda; all arguments are addresses and numbers.")
      .def("sum_parts", &sum_parts, nb::arg("into"), nb::arg("parts"), nb::kw_only(), nb::arg("dtype"),
           nb::arg("numel"), nb::arg("scale") = 1.0, nb::arg("overwrite") = false, nb::arg("squares") = 0,
           nb::arg("workspace") = 0, nb::arg("stream") = 0)
      .def("quantize", &quantize, nb::arg("values"), nb::kw_only(), nb::arg("dtype"), nb::arg("packed"),
           nb::arg("bits"), nb::arg("rows"), nb::arg("row_stride"), nb::arg("pieces"), nb::arg("piece_stride"),
           nb::arg("piece_numel"), nb::arg("stream") = 0)
      .def("dequantize", &dequantize, nb::arg("packed"), nb::arg("into"), nb::kw_only(), nb::arg("dtype"),
           nb::arg("bits"), nb::arg("rows"), nb::arg("numel"), nb::arg("stream") = 0)
      .def("dequantize_sum", &dequantize_sum, nb::arg("packed"), nb::arg("into"), nb::kw_only(), nb::arg("bits"),
           nb::arg("rows"), nb::arg("numel"), nb::arg("stream") = 0)
      .def("update", &update, nb::arg("rule"), nb::arg("units"), nb::kw_only(), nb::arg("grad"), nb::arg("weight"),
           nb::arg("factor") = 0, nb::arg("found_inf") = 0, nb::arg("stream") = 0)
      .def_prop_ro("launches", [](const Kernels& self) { return self.launches.load(); });
  m.def("host_kernels", &host_kernels, "The kernels' host build, on addresses of host memory.");
  m.def(
      "device_kernels",
      [](nb::bytes image, int device) {
        const std::string copy(image.c_str(), image.size());
        const GilReleased unlocked;
        return device_kernels(copy, device);
      },
      nb::arg("image"), nb::arg("device"),
      "Load a fatbin into a GPU's primary context. Raises RuntimeError with the driver's words.");
  m.def("driver_version", &driver_version, "The CUDA version that the driver supports, as 1000 * major + 10 * minor.");
  m.def("sum_workspace", &sum_workspace, nb::arg("numel"), "Doubles of the workspace that `sum_parts` needs.");
}
