"""The thread that updates units while the main thread goes on, and the decision whether an engine has one.

Called by `StepExecutor`; the engine makes it.

[Note: one thread] Updates run in the order of their submission, one at a time, without any collective: how
far the thread is decides only how long the wait for a `Ticket` takes. The thread is a daemon. `close`,
the end of the interpreter and the disappearance of the `Updater` end it after the unit that it updates; none
of them waits longer than `EXIT_SECONDS` for a disk that hangs. A forked child (a worker of a DataLoader) has
no such thread and raises an error instead of waiting for it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import perf_counter

import torch

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.contract.memory.moved import updates_just_in_time
from zerotrain.contract.worker_environment import CommEnv
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.work import Delays
from zerotrain.runtime.zero.pending import Ticket

KEY = "zero_optimization.offload_optimizer.just_in_time"

EXIT_SECONDS = 30.0
"""Seconds that the end of the process waits for the unit that is being updated."""


class UpdateAbandoned(RuntimeError):
    """Error of an update that had not begun when the engine was closed or the process was about to end."""

    def __init__(self) -> None:
        super().__init__(
            "the update was abandoned because the engine was closed meanwhile; call engine.synchronize() "
            "before close() where the last step counts"
        )


class Task:
    """The thread's work for one step: the updates of all units, one after another."""

    def __init__(
        self,
        run: Callable[[str], None],
        finish: Callable[[], None],
        *,
        pause: Callable[[], None],
        tickets: dict[str, Ticket],
        stored: Ticket,
    ) -> None:
        self._run, self._finish, self._pause = run, finish, pause
        self._tickets, self._stored = tickets, stored

    def do(self, is_closing: threading.Event) -> None:
        """Update every unit. An error ends the task, and every remaining ticket carries it."""
        left = deque([*self._tickets.values(), self._stored])
        try:
            for name, ticket in self._tickets.items():
                if is_closing.is_set():
                    raise UpdateAbandoned
                self._pause()
                began = perf_counter()
                self._run(name)
                left.popleft()
                ticket.end(perf_counter() - began)
            self._finish()
            self._stored.end(0.0)
        except BaseException as error:
            with suppress(Exception):  # the first error is the one that counts
                self._finish()
            for ticket in left:
                ticket.end(0.0, error)


class Updater:
    """The thread of one engine; see [Note: one thread]. It starts with the first `submit`."""

    def __init__(
        self,
        *,
        device: torch.device | None = None,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the updater, without a thread yet. `pause` is called before each unit: a hook for tests."""
        self._device = device
        self.pause = pause
        self._is_closing = threading.Event()
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end: weakref.finalize[..., Updater] | None = None

    def submit(
        self,
        order: Sequence[str],
        run: Callable[[str], None],
        finish: Callable[[], None],
        on_wait: Callable[[str], None] | None = None,
    ) -> tuple[dict[str, Ticket], Ticket]:
        """Call `run(name)` for every unit in this order, then `finish`, in the thread. Returns a ticket per
        unit, and one for `finish`. A thread that has waited for a unit calls `on_wait(name)`."""
        tickets = {name: Ticket(None if on_wait is None else partial(on_wait, name)) for name in order}
        stored = Ticket(None)
        if self._thread is None:
            self._start()
        self._queue.put(Task(run, finish, pause=self.pause, tickets=tickets, stored=stored))
        return tickets, stored

    def close(self) -> None:
        """End the thread after the unit that it updates. A second call does nothing."""
        if self._end is not None:
            self._end()

    def _start(self) -> None:
        # The thread holds no reference to this object: an engine that is dropped ends its thread.
        self._thread = threading.Thread(
            target=_work,
            args=(self._queue, self._is_closing, self._device),
            name="zerotrain-updater",
            daemon=True,
        )
        self._thread.start()
        self._end = weakref.finalize(
            self, _end, self._queue, self._is_closing, weakref.ref(self._thread), os.getpid()
        )


def _work(
    queue: SimpleQueue[Task | None],
    is_closing: threading.Event,
    device: torch.device | None,
) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    with torch.no_grad():
        while (task := queue.get()) is not None:
            task.do(is_closing)
            del task  # it holds the engine's units


def _end(
    queue: SimpleQueue[Task | None],
    is_closing: threading.Event,
    thread: weakref.ref[threading.Thread],
    pid: int,
) -> None:
    if os.getpid() != pid:
        return
    is_closing.set()
    queue.put(None)
    running = thread()
    if running is not None and running is not threading.current_thread():
        running.join(EXIT_SECONDS)


def runs_just_in_time(
    requested: bool | None, *, tier: str, stage: int, world_size: int, on_cuda: bool, is_elementwise: bool
) -> bool:
    """Return whether steps update just in time, by `updates_just_in_time`; the same on every rank.

    `tier` of the states: none, cpu or nvme; `is_elementwise`: the rule updates unit by unit, without
    collectives. Raises ConfigError when the user asks for it with an optimizer that works on all units
    together.
    """
    if tier != "none" and not is_elementwise:
        if requested:
            raise ConfigError(
                KEY,
                "needs an optimizer that updates each weight by itself",
                True,
                'Remove the key, or take "AdamW".',
            )
        return False
    return updates_just_in_time(requested, tier=tier, stage=stage, world_size=world_size, on_cuda=on_cuda)


def make_updater(config: EngineConfig, comm: Comm, *, is_elementwise: bool) -> Updater | None:
    """Return the thread that updates in the background, as configured; None = steps are synchronous.

    Raises ConfigError as `runs_just_in_time`.
    """
    offload = config.zero.offload_optimizer
    if not runs_just_in_time(
        None if offload is None else offload.just_in_time,
        tier="none" if offload is None else offload.device,
        stage=config.zero.stage,
        world_size=comm.world_size,
        on_cuda=comm.device.type == "cuda",
        is_elementwise=is_elementwise,
    ):
        return None
    delays = Delays(CommEnv.from_env(os.environ).delay_seconds, seed=comm.world_size + comm.rank)
    return Updater(device=comm.device, pause=delays.pause)
