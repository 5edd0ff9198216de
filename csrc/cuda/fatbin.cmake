# The kernels for GPUs: one fatbin, shipped as data beside _native, which loads it through the driver. nvcc is the one
# of ZEROTRAIN_NVCC, else that of the build's Python environment (nvidia-cuda-nvcc of the package index), of CUDA_HOME,
# of PATH or of the usual folder. Without one, everything else is built, and on a GPU torch's operations are used.
set(ZEROTRAIN_NVCC "$ENV{ZEROTRAIN_NVCC}" CACHE FILEPATH "nvcc for the GPU kernels; OFF builds none")
# No contraction, no approximate division: what a kernel computes is written out, and equals the host's bits. Code for
# sm_80 runs on every 8.x, that for sm_90 on 9.x, that for sm_100 on 10.x; the PTX is for what comes later.
set(ZEROTRAIN_NVCC_FLAGS -std=c++17 -O3 --fmad=false
  -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90
  -gencode=arch=compute_100,code=[sm_100,compute_100])

set(nvcc "${ZEROTRAIN_NVCC}")
if(nvcc STREQUAL "")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import nvidia; print(*nvidia.__path__, sep=';')"
    OUTPUT_VARIABLE nvidia_folders OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(TRANSFORM nvidia_folders APPEND "/cu13/bin")
  find_program(ZEROTRAIN_NVCC_FOUND nvcc HINTS ${nvidia_folders} "$ENV{CUDA_HOME}/bin" PATHS /usr/local/cuda/bin)
  set(nvcc "${ZEROTRAIN_NVCC_FOUND}")
endif()

set(compiles FALSE)
if(nvcc)
  get_filename_component(nvcc_root "${nvcc}" REALPATH)
  get_filename_component(nvcc_root "${nvcc_root}/../.." ABSOLUTE)
  set(nvcc_command "${nvcc}" -ccbin "${CMAKE_CXX_COMPILER}" "-I${nvcc_root}/include" ${ZEROTRAIN_NVCC_FLAGS} -fatbin)
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/nvcc_check.cu" "extern \"C\" __global__ void nothing() {}\n")
  execute_process(
    COMMAND ${nvcc_command} -o nvcc_check.fatbin nvcc_check.cu WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}"
    RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
  if(failed EQUAL 0)
    set(compiles TRUE)
  else()
    message(STATUS "zerotrain: ${nvcc} does not compile here: ${said}")
  endif()
endif()

if(compiles)
  set(fatbin "${CMAKE_CURRENT_BINARY_DIR}/_native_cuda.fatbin")
  file(GLOB cuda_sources CONFIGURE_DEPENDS cuda/*.cu cuda/*.cuh cuda/*.hpp)
  add_custom_command(
    OUTPUT "${fatbin}"
    COMMAND ${nvcc_command} -o "${fatbin}" "${CMAKE_CURRENT_SOURCE_DIR}/cuda/kernels.cu"
    DEPENDS ${cuda_sources} VERBATIM)
  add_custom_target(native_cuda ALL DEPENDS "${fatbin}")
  install(FILES "${fatbin}" DESTINATION zerotrain/runtime)
  message(STATUS "zerotrain: GPU kernels compiled by ${nvcc}")
else()
  message(STATUS "zerotrain: no nvcc (CUDA 12.8 or later): a GPU uses torch's operations, no kernels of our own")
endif()
