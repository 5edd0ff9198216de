// The AdamW kernel for one instruction set; the flags are in CMakeLists.txt.
#define ZEROTRAIN_ADAMW_NAME adamw_baseline
#include "adamw_kernel.inc"
