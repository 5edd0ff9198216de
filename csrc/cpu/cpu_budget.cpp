#include "zerotrain/cpu_budget.hpp"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

namespace zerotrain {
namespace {

// The smallest limit of a group and of those above it; `cores_of(folder)` returns 0 without a limit. In a container
// the path may be that of the host, which is not mounted: then its last existing folder counts.
template <class CoresOf>
std::size_t least_upwards(const std::string& mount, std::string group, const CoresOf& cores_of) {
  std::size_t least = 0;
  for (;;) {
    const std::size_t cores = cores_of(mount + group);
    if (cores && (!least || cores < least)) least = cores;
    const std::size_t cut = group.rfind('/');
    if (group.empty() || cut == std::string::npos) return least;
    group.resize(cut);
  }
}

std::size_t rounded_up(double quota, double period) {
  if (quota <= 0.0 || period <= 0.0) return 0;
  const double cores = quota / period;
  const auto whole = static_cast<std::size_t>(cores);
  return std::max<std::size_t>(static_cast<double>(whole) < cores ? whole + 1 : whole, 1);
}

std::size_t cores_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  double quota = 0.0, period = 0.0;  // "max 100000" leaves the quota 0
  file >> quota >> period;
  return file ? rounded_up(quota, period) : 0;
}

std::size_t cores_v1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us"), period_file(folder + "/cpu.cfs_period_us");
  double quota = 0.0, period = 0.0;  // a quota of -1 means no limit
  quota_file >> quota;
  period_file >> period;
  return rounded_up(quota, period);
}

bool names_cpu(const std::string& controllers) {
  std::istringstream names(controllers);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "cpu") return true;
  }
  return false;
}

// The positive number at the start of a variable ("4" and OpenMP's "4,2"); 0 if there is none.
std::size_t number_in(const char* variable) {
  const char* text = std::getenv(variable);
  const long number = text ? std::strtol(text, nullptr, 10) : 0;
  return number > 0 ? static_cast<std::size_t>(number) : 0;
}

std::size_t cores_of_affinity() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return static_cast<std::size_t>(CPU_COUNT(&cores));
  return std::max(std::thread::hardware_concurrency(), 1u);  // more cores than the set holds
}

// The value when the module was loaded: an OpenMP runtime may bind this thread to one core later.
const std::size_t cores_at_load = cores_of_affinity();

}  // namespace

std::size_t cgroup_cores(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  std::size_t least = 0;
  for (std::string line; std::getline(groups, line);) {  // "0::/path" or "4:cpu,cpuacct:/path"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    std::size_t cores = 0;
    if (controllers.empty()) {
      cores = least_upwards(root + "/sys/fs/cgroup", group, cores_v2);
    } else if (names_cpu(controllers)) {
      cores = least_upwards(root + "/sys/fs/cgroup/cpu", group, cores_v1);
      if (!cores) cores = least_upwards(root + "/sys/fs/cgroup/" + controllers, group, cores_v1);
    }
    if (cores && (!least || cores < least)) least = cores;
  }
  return least;
}

std::size_t num_usable_threads(const std::string& root) {
  std::size_t cores = cores_at_load;
  if (const std::size_t allowed = cgroup_cores(root)) cores = std::min(cores, allowed);
  if (const std::size_t wanted = number_in("ZEROTRAIN_CPU_THREADS")) return std::min(cores, wanted);
  if (const std::size_t wanted = number_in("OMP_NUM_THREADS")) return std::min(cores, wanted);
  if (const std::size_t ranks = number_in("LOCAL_WORLD_SIZE")) cores /= ranks;
  return std::max<std::size_t>(cores, 1);
}

}  // namespace zerotrain
