// The kernels on the host, element by element, in one thread: a reference, not a fast path.
#pragma once

#include <memory>

#include "kernels.hpp"

namespace zerotrain {
namespace cuda {

std::unique_ptr<Kernels> host_kernels();

}  // namespace cuda
}  // namespace zerotrain
