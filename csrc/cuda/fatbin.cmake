# The kernels for GPUs: one fatbin, shipped as data beside _native, which loads it through the driver. nvcc is the one
# of ZEROTRAIN_NVCC, else that of the build's Python environment (nvidia-cuda-nvcc of the package index), of PATH or of
# the usual folder. Without one, everything else is built, and on a GPU torch's operations are used.
set(ZEROTRAIN_NVCC "$ENV{ZEROTRAIN_NVCC}" CACHE FILEPATH "nvcc for the GPU kernels; OFF builds none")
set(nvcc "${ZEROTRAIN_NVCC}")
if(NOT nvcc AND NOT nvcc STREQUAL "OFF")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import nvidia; print(*nvidia.__path__, sep=';')"
    OUTPUT_VARIABLE nvidia_folders OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(TRANSFORM nvidia_folders APPEND "/cu13/bin" OUTPUT_VARIABLE nvidia_folders)
  find_program(ZEROTRAIN_NVCC_FOUND nvcc HINTS ${nvidia_folders} ENV CUDA_HOME PATH_SUFFIXES bin PATHS /usr/local/cuda/bin)
  set(nvcc "${ZEROTRAIN_NVCC_FOUND}")
endif()
if(nvcc)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE nvcc_text RESULT_VARIABLE nvcc_failed ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" nvcc_release "${nvcc_text}")
  set(nvcc_release "${CMAKE_MATCH_1}")
endif()

if(nvcc AND NOT nvcc_failed AND nvcc_release VERSION_GREATER_EQUAL 12.8)
  # No contraction, no approximate division: what a kernel computes is written out, and equals the host's bits. Code for
  # sm_80 runs on every 8.x, that for sm_90 on 9.x, that for sm_100 on 10.x; the PTX is for what comes later.
  set(ZEROTRAIN_NVCC_FLAGS -std=c++17 -O3 --fmad=false
    -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90
    -gencode=arch=compute_100,code=[sm_100,compute_100])
  get_filename_component(nvcc_root "${nvcc}" REALPATH)
  get_filename_component(nvcc_root "${nvcc_root}" DIRECTORY)
  get_filename_component(nvcc_root "${nvcc_root}" DIRECTORY)
  set(fatbin "${CMAKE_CURRENT_BINARY_DIR}/_native_cuda.fatbin")
  file(GLOB cuda_sources CONFIGURE_DEPENDS cuda/*.cu cuda/*.cuh cuda/*.hpp)
  add_custom_command(
    OUTPUT "${fatbin}"
    COMMAND "${nvcc}" ${ZEROTRAIN_NVCC_FLAGS} "-I${nvcc_root}/include" -fatbin -o "${fatbin}"
            "${CMAKE_CURRENT_SOURCE_DIR}/cuda/kernels.cu"
    DEPENDS ${cuda_sources} VERBATIM)
  add_custom_target(native_cuda ALL DEPENDS "${fatbin}")
  install(FILES "${fatbin}" DESTINATION zerotrain/runtime)
  message(STATUS "zerotrain: GPU kernels by ${nvcc} ${nvcc_release}")
else()
  message(STATUS "zerotrain: no nvcc of 12.8 or later; the GPU uses torch's operations, no kernels of our own")
endif()
