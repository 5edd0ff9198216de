// The functions with which each part of the native module adds its bindings; called by module.cpp.
#pragma once

#include <nanobind/nanobind.h>

void bind_kernels(nanobind::module_& m);
void bind_cuda(nanobind::module_& m);
void bind_io(nanobind::module_& m);
void bind_seal(nanobind::module_& m);
