// The number of threads that this process may use: the least of the cores on which it may run, the processor time
// that its control groups allow (v1 and v2), and its share of both among the ranks of its node.
#pragma once

#include <cstddef>
#include <string>

namespace zerotrain {

// Processor time in cores that the control groups allow, rounded up; 0 without a limit. `root` replaces "/" in tests.
std::size_t cgroup_cores(const std::string& root);

// min(cores, cgroup) bounded by ZEROTRAIN_CPU_THREADS, else by OMP_NUM_THREADS, else divided by
// LOCAL_WORLD_SIZE; at least 1.
std::size_t num_usable_threads(const std::string& root = "");

}  // namespace zerotrain
