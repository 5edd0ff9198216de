"""Our CUDA kernels (csrc/cuda): loaded once per device, checked on it, and called with torch's tensors.

`device.py` loads and decides, `check.py` compares with the references, and each family of kernels has a
module of calls: `sums.py`, `quantize.py`, `adam.py`. Nothing here imports another part of the engine.
"""
