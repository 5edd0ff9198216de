// How many threads this process may use: the least of the cores it may run on, the processor time that its
// control groups allow (v1 and v2), and its share of them among the ranks of its node.
#pragma once

#include <cstddef>
#include <string>

namespace zerotrain {

// Cores' worth of processor time that the control groups allow, rounded up; 0 without a limit. `root` stands
// for "/", for tests.
std::size_t cgroup_cores(const std::string& root);

// min(cores, cgroup) bounded by ZEROTRAIN_CPU_THREADS, else by OMP_NUM_THREADS, else divided by
// LOCAL_WORLD_SIZE; at least 1.
std::size_t num_usable_threads(const std::string& root = "");

}  // namespace zerotrain
