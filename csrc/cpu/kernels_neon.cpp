// All kernels for one instruction set; the flags are in CMakeLists.txt.
#define ZEROTRAIN_UPDATE_NAME update_neon
#define ZEROTRAIN_ACCUMULATE_NAME accumulate_neon
#define ZEROTRAIN_SUM_SQUARES_NAME sum_squares_neon
#include "bf16.inc"
#include "vector_neon.inc"
#include "update_kernel.inc"
#include "sums_kernel.inc"
