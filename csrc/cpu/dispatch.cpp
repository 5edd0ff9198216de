// The kernels that this processor can run. Read by the bindings.
#include "zerotrain/isa.hpp"

namespace zerotrain {
namespace {

constexpr Isa kBaseline{"baseline", update_baseline, accumulate_baseline, sum_squares_baseline};
#if defined(ZEROTRAIN_X86)
constexpr Isa kAvx2{"avx2", update_avx2, accumulate_avx2, sum_squares_avx2};
constexpr Isa kAvx512{"avx512", update_avx512, accumulate_avx512, sum_squares_avx512};
#elif defined(ZEROTRAIN_ARM)
constexpr Isa kNeon{"neon", update_neon, accumulate_neon, sum_squares_neon};
#endif

struct Table {
  Isa entries[3];
  std::size_t count = 0;

  Table() {
#if defined(ZEROTRAIN_X86)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      entries[count++] = kAvx512;
    }
    if (has_avx2) entries[count++] = kAvx2;
#elif defined(ZEROTRAIN_ARM)
    entries[count++] = kNeon;  // every AArch64 processor has it
#endif
    entries[count++] = kBaseline;
  }
};

}  // namespace

const Isa* available_isas(std::size_t& count) {
  static const Table table;
  count = table.count;
  return table.entries;
}

}  // namespace zerotrain
