// All kernels, for one fatbin.
#include "adam.cu"
#include "quantize.cu"
#include "sum_parts.cu"
