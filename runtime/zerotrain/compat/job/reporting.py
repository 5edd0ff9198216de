"""Reports of a script to its launcher, from the first engine that it makes. Until then no torch is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zerotrain.contract.worker_environment import RankEnv
from zerotrain.runtime.facade.observer import on_new_engine

if TYPE_CHECKING:
    from zerotrain.runtime.engine import Engine

_REPORTER = "zerotrain.runtime.train.automatic_reporter"


@contextmanager
def reported() -> Iterator[None]:
    """Report the training of a script that runs within, and how it ends; do nothing without a launcher."""
    if RankEnv.from_env(os.environ).channel_socket is None:
        yield
        return
    on_new_engine(_watch)
    try:
        yield
    except BaseException as error:
        _tell_end(error)
        raise
    _tell_end(None)


def _watch(engine: Engine) -> None:
    from zerotrain.runtime.train.automatic_reporter import watch_engine

    watch_engine(engine)


def _tell_end(error: BaseException | None) -> None:
    if (module := sys.modules.get(_REPORTER)) is not None:
        module.program_ended(error)
