// The spill file's part of the Python module.
#include "zerotrain/bind.hpp"

void bind_io(nanobind::module_&) {}
