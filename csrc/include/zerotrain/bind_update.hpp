// The Python object behind `_native.UpdateTask`, for other parts of the module that take one as an argument.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "zerotrain/update.hpp"

// An update without its states, which are given per call: `task.numel` elements of gradient and weight, kept
// alive here. `task.part(start, stop)` and then setting `master` or `remainder` and `state` gives one that runs.
struct BoundTask {
  nanobind::ndarray<nanobind::ro, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu> grad;
  nanobind::ndarray<nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu> weight;
  std::vector<zerotrain::Segment> segments;
  zerotrain::UpdateTask task;
};

void bind_update(nanobind::module_& m);
