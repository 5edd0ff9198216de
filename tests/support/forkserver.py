"""The server from which tests fork processes that have torch and the engine imported, and new interpreters.

A process has one such server, and it imports what was named last before its first child. So there is one
list, and every test that wants a child takes `CONTEXT`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.preload"])


def in_new_interpreter(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function where nothing but its module is imported, for what depends on imports."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
