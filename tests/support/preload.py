"""Modules that ranks have imported when they are forked: all that tests share, but the test's own file."""

from __future__ import annotations

import gc

import pytest  # noqa: F401

# torch imports these at the first optimizer and the first backward, for 1.7 s of every process.
import torch._dynamo
import torch.distributed.tensor  # noqa: F401

import tests.support.factory_models
import tests.support.training  # noqa: F401
import zerotrain.runtime.checkpoint.reader
import zerotrain.runtime.checkpoint.writer
import zerotrain.runtime.engine
import zerotrain.runtime.initialization
import zerotrain.runtime.optim.native
import zerotrain.runtime.train.main  # noqa: F401

# They live as long as the process: collections in the ranks pass them by and write to no shared page.
gc.collect()
gc.freeze()
