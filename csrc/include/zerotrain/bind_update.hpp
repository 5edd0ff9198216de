// The Python object behind `_native.UpdateTask`, for other parts of the module that take one as an argument.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

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

void bind_update(nanobind::module_& m);
