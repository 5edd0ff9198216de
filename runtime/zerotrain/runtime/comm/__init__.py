"""Collectives of the data-parallel group: gloo on CPU, NCCL on CUDA. Only `zero` and the engine call them."""
