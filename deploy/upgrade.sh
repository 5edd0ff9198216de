#!/usr/bin/env bash
# `make upgrade`: moves all pins to the newest versions, for every Python that the project supports.
#
# Writes deploy/constraints.txt (versions, for `make venv`) and deploy/images/requirements/*.txt (the same versions with
# the digests of all their wheels, for the images). UV names a `uv` program.
set -euo pipefail
cd "$(dirname "$0")/.."

oldest_python=$(sed -nE 's/^requires-python = ">=([0-9.]+)"/\1/p' pyproject.toml)
constraints=deploy/constraints.txt
images=deploy/images/requirements
export UV_CUSTOM_COMPILE_COMMAND="make upgrade"
# Wheels alone: whatever was built from source would need pinned build requirements of its own.
resolve=("$UV" pip compile --quiet --universal --python-version "$oldest_python" --only-binary :all: --no-annotate)
with_digests=("${resolve[@]}" --generate-hashes --constraint "$constraints")
names() { sed -nE 's/^([a-z0-9.-]+)==.*/\1/p' "$1" | sort -u; }

"${resolve[@]}" --upgrade --all-extras pyproject.toml deploy/constraints.in --output-file "$constraints"

# torch's build for CUDA and what that alone needs stand apart, since an image for CPUs has another torch. nvcc is needed
# only where the GPU kernels are compiled.
nvcc=(nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm)
cuda=(torch $(names "$constraints" | grep -E '^(nvidia|cuda)-|^triton$' | grep -vxF "$(printf '%s\n' "${nvcc[@]}")"))
"${with_digests[@]}" --extra operator pyproject.toml --output-file "$images/operator.txt"
"${with_digests[@]}" --extra runtime --extra cli pyproject.toml --output-file "$images/runtime.txt" \
    "${cuda[@]/#/--no-emit-package=}"
printf '%s\n' "${cuda[@]}" | "${with_digests[@]}" --no-deps - --output-file "$images/torch-cuda.txt"
# What the build stages run: pip, the list of contents, and the build requirements of pyproject.toml.
printf '%s\n' pip cyclonedx-bom | "${with_digests[@]}" - --output-file "$images/tools.txt"
{ printf '%s\n' scikit-build-core nanobind cmake ninja
  printf "%s ; platform_machine == 'x86_64' and sys_platform == 'linux'\n" nvidia-cuda-runtime "${nvcc[@]}"; } |
    "${with_digests[@]}" - --output-file "$images/build.txt"
