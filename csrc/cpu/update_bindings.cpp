// The optimizers' part of the Python module: typed, zero-copy DLPack arrays as inputs, and no header of torch.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <vector>

#include "zerotrain/arrays.hpp"
#include "zerotrain/bind_update.hpp"
#include "zerotrain/gil.hpp"
#include "zerotrain/thread_pool.hpp"

namespace nb = nanobind;
using namespace zerotrain;

namespace {

// From here on the weights of one update are more than the caches keep until they are read again.
constexpr std::size_t kStreamsFrom = std::size_t{1} << 21;

void make_segment(PySegment* self, std::size_t start, std::size_t stop, double lr, double beta1, double beta2,
                  double eps, double weight_decay, std::int64_t step, bool bias_correction, double lr_decay,
                  double initial_sum) {
  require(start <= stop, "Segment: start " + std::to_string(start) + " is behind stop " + std::to_string(stop));
  require(step >= 1, "Segment: step must be at least 1; got " + std::to_string(step));
  new (self) PySegment{
      start, stop, {lr, beta1, beta2, eps, weight_decay, step, bias_correction, lr_decay, initial_sum}};
}

void make_task(BoundTask* self, const std::string& rule, const std::vector<PySegment>& segments, AnyConst grad,
               nb::object weight_or_none, double grad_scale, bool weight_is_master, bool bf16_states) {
  UpdateTask task;
  task.rule = rule_of(rule);
  task.numel = grad.size();
  task.grad = grad.data();
  task.grad_type = float_type("UpdateTask: grad", grad.dtype());
  Any weight;
  if (!weight_or_none.is_none()) {
    require(nb::try_cast(weight_or_none, weight, false),
            "UpdateTask: weight must be a contiguous 1-D array on the CPU");
    check_size("UpdateTask: weight", weight.size(), task.numel);
    task.weight = weight.data();
    task.weight_type = float_type("UpdateTask: weight", weight.dtype());
    task.streams_weight = task.numel >= kStreamsFrom;
    check_apart("UpdateTask", {"weight", task.weight, width(task.weight_type) * task.numel},
                {"grad", task.grad, width(task.grad_type) * task.numel});
  }
  if (weight_is_master) {
    require(task.weight_type == Float::f32 || task.weight_type == Float::bf16,
            "UpdateTask: only float32 and bfloat16 weights can be the master");
    task.master = task.weight;
    task.master_type = task.weight_type;
    task.weight = nullptr;
    task.weight_type = Float::none;
  }
  if (bf16_states) {
    require(task.master && task.master_type == Float::bf16,
            "UpdateTask: bfloat16 states need a bfloat16 weight that is the master");
    task.state_type = Float::bf16;
  }
  std::vector<Segment> derived;
  std::size_t end = 0;
  for (const PySegment& segment : segments) {
    require(segment.start >= end && segment.stop <= task.numel,
            "UpdateTask: segment [" + std::to_string(segment.start) + ", " + std::to_string(segment.stop) +
                ") must lie behind the one before it, which ends at " + std::to_string(end) + ", and within the " +
                std::to_string(task.numel) + " elements of grad");
    end = segment.stop;
    derived.push_back({segment.start, segment.stop, derive(task.rule, segment.hyper, grad_scale)});
  }
  new (self) BoundTask{std::move(grad), std::move(weight), std::move(derived), task};
  self->task.segments = self->segments.data();
  self->task.num_segments = self->segments.size();
}

// The kernels assume that no other array overlaps the memory that they write.
void check_memory(const UpdateTask& task) {
  const std::size_t numel = task.numel;
  const void* master = task.master ? static_cast<const void*>(task.master) : task.remainder;
  const std::size_t state_bytes = width(task.state_type) * numel;
  const Extent arrays[] = {{"master", master, (task.master ? width(task.master_type) : 2) * numel},
                           {"state 0", task.state[0], state_bytes},
                           {"state 1", task.state[1], task.state[1] ? state_bytes : 0},
                           {"grad", task.grad, width(task.grad_type) * numel},
                           {"weight", task.weight, width(task.weight_type) * numel}};
  for (const Extent& one : arrays) {
    for (const Extent& other : arrays) {
      if (&one == &other) break;
      check_apart("update_", other, one);
    }
  }
}

void set_master(UpdateTask& task, const Any& master) {
  require(!task.master, "update_: the task's weight is its master; give none");
  if (master.dtype() == nb::dtype<std::int16_t>()) {
    require(task.weight_type == Float::bf16,
            "update_: an int16 master is the remainder of bfloat16 weights; this task writes none");
    task.remainder = static_cast<std::int16_t*>(master.data());
    return;
  }
  require(master.dtype() == nb::dtype<float>(),
          "update_: master must be float32, or int16 for the remainder of bfloat16 weights");
  task.master = master.data();
}

void update(const BoundTask& bound, nb::object master_or_none, std::vector<Any> states, std::size_t start,
            int threads, const std::string& isa_name) {
  require(!states.empty(), "update_: states is empty");
  const std::size_t numel = states[0].size();
  require(start <= bound.task.numel && numel <= bound.task.numel - start,
          "update_: state 0 covers elements " + std::to_string(start) + " to " + std::to_string(start + numel) +
              ", the task has " + std::to_string(bound.task.numel));
  UpdateTask task = bound.task.part(start, start + numel);
  Any master;
  if (!master_or_none.is_none()) {
    require(nb::try_cast(master_or_none, master, false), "update_: master must be a contiguous 1-D array on the CPU");
    check_size("update_: master", master.size(), numel);
    set_master(task, master);
  }
  require(task.master || task.remainder, "update_: master is missing; only a task whose weight is the master has none");
  require(states.size() == num_states(task.rule), "update_: the rule has " + std::to_string(num_states(task.rule)) +
                                                      " states; got " + std::to_string(states.size()));
  for (std::size_t i = 0; i < states.size(); ++i) {
    const std::string name = "update_: state " + std::to_string(i);
    check_size(name, states[i].size(), numel);
    require(is_of(states[i].dtype(), task.state_type),
            name + " must be " + (task.state_type == Float::bf16 ? "bfloat16" : "float32") + ", as the task says");
    task.state[i] = states[i].data();
  }
  check_memory(task);
  const Isa& isa = find_isa(isa_name);
  const GilReleased unlocked;
  ThreadPool::shared().run(
      (numel + kBlock - 1) / kBlock,
      [&](std::size_t block) {
        update_range(task, block * kBlock, std::min(numel, (block + 1) * kBlock), isa);
      },
      static_cast<std::size_t>(std::max(threads, 0)));
}

const char* name_of(const BoundTask& bound) {
  switch (bound.task.rule) {
    case Rule::adam:
      return "adam";
    case Rule::adamw:
      return "adamw";
    case Rule::adagrad:
      return "adagrad";
    case Rule::lion:
      return "lion";
  }
  return "";
}

}  // namespace

Rule rule_of(const std::string& name) {
  if (name == "adam") return Rule::adam;
  if (name == "adamw") return Rule::adamw;
  if (name == "adagrad") return Rule::adagrad;
  if (name == "lion") return Rule::lion;
  throw nb::value_error(("rule '" + name + "' is unknown; there are adam, adamw, adagrad and lion").c_str());
}

void bind_update(nb::module_& m) {
  nb::class_<PySegment>(m, "Segment", "Hyperparameters of elements [start, stop) of an update.")
      .def("__init__", &make_segment, nb::arg("start"), nb::arg("stop"), nb::kw_only(), nb::arg("lr"),
           nb::arg("beta1") = 0.0, nb::arg("beta2") = 0.0, nb::arg("eps") = 0.0, nb::arg("weight_decay") = 0.0,
           nb::arg("step"), nb::arg("bias_correction") = true, nb::arg("lr_decay") = 0.0,
           nb::arg("initial_sum") = 0.0)
      .def_ro("start", &PySegment::start)
      .def_ro("stop", &PySegment::stop);
  // noconvert: nanobind would pass a copy of another dtype or stride, and writes into it would be lost.
  nb::class_<BoundTask>(m, "UpdateTask",
                        "One optimizer step over the elements of `grad`, apart from where its states are.\n\n"
                        "`weight`, when given, gets the new values; with `weight_is_master` it is the master. `bf16_states`: states are bfloat16, not\n"
                        "float32. Segments ascend; what none of them covers stays as it is. Both arrays are kept alive and must not move.")
      .def("__init__", &make_task, nb::arg("rule"), nb::arg("segments"), nb::arg("grad").noconvert(),
           nb::arg("weight").none() = nb::none(), nb::kw_only(), nb::arg("grad_scale") = 1.0,
           nb::arg("weight_is_master") = false, nb::arg("bf16_states") = false)
      .def_prop_ro("rule", &name_of)
      .def_prop_ro("numel", [](const BoundTask& bound) { return bound.task.numel; })
      .def_prop_ro("num_states", [](const BoundTask& bound) { return num_states(bound.task.rule); });
  m.def("update_", &update, nb::arg("task"), nb::arg("master").none(), nb::arg("states").noconvert(),
        nb::kw_only(), nb::arg("start") = 0, nb::arg("threads") = 0, nb::arg("isa") = "",
        "The step on elements [start, start + len(states[0])) of the task, in place: master (float32, or the int16\n"
        "remainder of bfloat16 weights; None where the task's weight is the master), its states and the task's\n"
        "weight are written.");
}
