"""Modules that ranks have imported when they are forked: all that tests share, but the test's own file."""

from __future__ import annotations

import gc

import pytest  # noqa: F401

import tests.support.training  # noqa: F401
import zerotrain.runtime.engine  # noqa: F401

# They live as long as the process: collections in the ranks pass them by and write to no shared page.
gc.collect()
gc.freeze()
