// The Python object behind `_native.UpdateTask`, for other parts of the module that take one as an argument.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "zerotrain/update.hpp"

// An update without its states, which are given per call: it keeps `task.numel` elements of gradient and weight
// alive. `task.part(start, stop)`, with `master` or `remainder` and `state` set afterwards, gives a task that can
// run.
struct BoundTask {
  nanobind::ndarray<nanobind::ro, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu> grad;
  nanobind::ndarray<nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu> weight;
  std::vector<zerotrain::Segment> segments;
  zerotrain::UpdateTask task;
};

// `_native.Segment`: elements [start, stop), and their hyperparameters as the user gives them.
struct PySegment {
  std::size_t start, stop;
  zerotrain::Hyper hyper;
};

// Raises ValueError for a name that is no rule.
zerotrain::Rule rule_of(const std::string& name);

void bind_update(nanobind::module_& m);
