"""Collectives of the data-parallel group: gloo on CPU, NCCL on CUDA. Called by `zero` and the engine
alone."""
