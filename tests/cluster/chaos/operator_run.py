"""One life of the operator in this process, from its start to a death that none of its code can handle.

It is the same `Manager` that kopf starts in production, in its own event loop and thread. The runs with
SIGKILL kill kopf itself.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.cluster.chaos.awaits import Gate
from tests.support.devcluster import PATIENCE_S
from zerotrain.operator.cluster import api as operator_api
from zerotrain.operator.cluster.api import ApiLimits
from zerotrain.operator.cluster.channel import ChannelKind
from zerotrain.operator.cluster.connection import ServerTime, connect
from zerotrain.operator.cluster.errors import ApiError
from zerotrain.operator.controller.config import OperatorConfig
from zerotrain.operator.controller.manager import Manager, dead_tasks

QUICK = ApiLimits(first_backoff_s=0.05, max_backoff_s=0.5, timeout_s=10)
"""Production's retries at a tenth of its pauses, as a run has a thousand lives."""


clock_off_s: ContextVar[float] = ContextVar("clock_off_s", default=0.0)
"""Clock error in seconds of the life that runs in this context."""


class WrongTime(ServerTime):
    """The operator's clock on a machine whose own clock is wrong."""

    def __init__(self) -> None:
        off_s = clock_off_s.get()
        super().__init__(wall=lambda: datetime.now(UTC) + timedelta(seconds=off_s))


setattr(operator_api, "ServerTime", WrongTime)  # noqa: B010  (mypy takes no assignment to a class)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Data that all lives of one replica share: a pod's UID and its mounted files."""

    kubeconfig: Path
    key_file: Path
    namespace: str = "zerotrain-system"
    identity: str = "operator-under-test"
    clock_off_s: float = 0.0
    """Error in seconds of the clock of the machine on which this life runs."""

    def config(self) -> OperatorConfig:
        return OperatorConfig(
            namespace=self.namespace,
            identity=self.identity,
            key_file=self.key_file,
            channel=ChannelKind.DIRECT,
            workers=8,
            limits=QUICK,
        )


class OperatorRun:
    """A life from `start()` until its doom, `kill()` or `retire()`.

    `doom` is called at every await point (its place, whether a pass over a job waits there) and ends this
    life there by returning True.
    """

    def __init__(self, setup: Setup, doom: Callable[[str, bool], bool]) -> None:
        self.dead = threading.Event()
        self.error: BaseException | None = None
        """The error that ended the operator without a kill."""
        self.ended: list[str] = []
        """Tasks of the operator that had ended with an error."""
        self.runtime: Manager | None = None
        self._setup = setup
        self._loop = asyncio.new_event_loop()
        self._gate = Gate(doom, self._loop.stop)
        self._loop.set_task_factory(self._gate.tasks)
        self._loop.set_exception_handler(lambda _loop, _context: None)
        self._thread = threading.Thread(target=self._live, name="operator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def kill(self) -> None:
        """End the life now, wherever it is."""
        if not self.dead.is_set():
            with suppress(RuntimeError):  # it has just died by itself
                self._loop.call_soon_threadsafe(self._gate.close)
        self._thread.join(timeout=PATIENCE_S)

    def retire(self) -> None:
        """End the life as SIGTERM does: tasks are cancelled, the lease is released."""
        if self.runtime is not None and not self.dead.is_set():
            asyncio.run_coroutine_threadsafe(self.runtime.stop(), self._loop).result(PATIENCE_S)
        self.kill()

    def leads(self) -> bool:
        return self.runtime is not None and self.runtime.controller.may_act.is_set()

    def _live(self) -> None:
        try:
            self._loop.create_task(self._operate())
            self._loop.run_forever()
            self.ended = [] if self.runtime is None else dead_tasks(self.runtime._tasks)
            self._close()
        except BaseException as error:
            self.error = error
        finally:
            self.runtime = None
            self.dead.set()

    async def _operate(self) -> None:
        clock_off_s.set(self._setup.clock_off_s)
        try:
            connection = await connect(self._setup.kubeconfig)
            runtime = Manager(self._setup.config(), connection)
            await runtime.start()
            self.runtime = runtime
        except ApiError:
            self._gate.close()  # it could not start: its container is restarted
        except Exception as error:
            self.error = error
            self._gate.close()

    def _close(self) -> None:
        """Close the sockets, as the kernel does for a dead process; no coroutine runs any more."""
        self._gate.shut = True
        transports = getattr(self._loop, "_transports", {})
        for transport in list(transports.values()):
            transport.abort()
        self._loop.set_task_factory(None)
        with suppress(RuntimeError):  # killed once more while it is being closed
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._gate.close_coroutines()


@contextmanager
def ignore_unraisable_errors() -> Iterator[None]:
    """Suppress Python's messages about the coroutines of dead lives, which are collected in thousands."""
    previous = sys.unraisablehook

    def hook(problem: Any) -> None:
        if not hasattr(problem.object, "cr_frame") and "coroutine" not in repr(problem.object):
            previous(problem)

    sys.unraisablehook = hook
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
            gc.collect()
    finally:
        sys.unraisablehook = previous
