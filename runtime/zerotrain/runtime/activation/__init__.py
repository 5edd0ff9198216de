"""Activation checkpointing (ZeRO-R): backward recomputes what forward did not keep.

torch's non-reentrant checkpointing does the recomputation. This package decides where the inputs of a
checkpointed part are kept: as they are, in host memory, partitioned over a model-parallel group, or in one
preallocated buffer. Called by models, by user scripts through `zerotrain.runtime`, and by `initialize`, which
reads the `activation_checkpointing` block.
"""
