// All kernels for one instruction set; the flags are in CMakeLists.txt.
#define ZEROTRAIN_UPDATE_NAME update_avx2
#define ZEROTRAIN_ACCUMULATE_NAME accumulate_avx2
#define ZEROTRAIN_SUM_SQUARES_NAME sum_squares_avx2
#include "bf16.inc"
#include "vector_avx2.inc"
#include "update_kernel.inc"
#include "sums_kernel.inc"
