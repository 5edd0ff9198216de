// The AdamW kernel for one instruction set; the flags are in CMakeLists.txt.
#define ZEROTRAIN_ADAMW_NAME adamw_avx2
#include "adamw_kernel.inc"
