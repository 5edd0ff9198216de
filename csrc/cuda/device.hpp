// The kernels on a GPU, through the driver's own interface: libcuda is loaded when the first one is asked for, so that
// this module needs none, and no toolkit or torch header is used.
#pragma once

#include <memory>
#include <string>

#include "kernels.hpp"

namespace zerotrain {
namespace cuda {

// Load a fatbin into the primary context of a device, which torch uses, too. It stays loaded until the process ends.
// Raises std::runtime_error with the driver's words.
std::unique_ptr<Kernels> device_kernels(const std::string& image, int device);

// The CUDA version that the driver supports: 1000 * major + 10 * minor.
int driver_version();

}  // namespace cuda
}  // namespace zerotrain
