"""Rendezvous in the store for engine calls that all ranks must make together, before any data is sent.

Otherwise a rank that saves a checkpoint alone would send the sizes of its files to ranks that expect weights.
The watchdog watches this wait like those for collectives, so both sides get an error that says which rank
called what.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from zerotrain.runtime.comm.accounts import Accounts
from zerotrain.runtime.comm.mismatch import CALL, CommError
from zerotrain.runtime.comm.watchdog import own_store
from zerotrain.runtime.comm.work import Ready

_FLAG = 1 << 32
"""Number that a rank with a flag adds to the count of those that arrived, beside itself."""
_LOOK_AFTER = timedelta(milliseconds=200)
"""Time that a wait in the store lasts before the watchdog is checked; then the wait starts again."""


class Meeting(Ready):
    """Handle whose wait ends when every rank has arrived."""

    def __init__(
        self,
        store: Any,
        *,
        number: int,
        world_size: int,
        timeout: timedelta,
        check: Callable[[], None],
        flag: bool,
    ) -> None:
        """Announce this rank, and its flag. `check` is called repeatedly during a wait, and may raise."""
        super().__init__(self._until_all)
        self._store = store
        self._all = f"zerotrain-meeting/{number}/all"
        self._timeout, self._check = timeout, check
        num_flags, num_arrived = divmod(store.add(f"zerotrain-meeting/{number}", 1 + _FLAG * flag), _FLAG)
        self.any_flag: bool = num_flags > 0
        """Whether any rank has the flag; of all ranks once the meeting is over."""
        self._is_over: bool = num_arrived == world_size
        if self._is_over:
            store.set(self._all, str(int(self.any_flag)))

    def is_completed(self) -> bool:
        """Return whether every rank is known to have arrived."""
        return self._is_over

    def _until_all(self) -> None:
        """Block until every rank has arrived. Raises CommError."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self._is_over:
            asked = time.monotonic()
            try:
                self._store.wait([self._all], _LOOK_AFTER)
                self.any_flag = bool(self._store.get(self._all) == b"1")
                self._is_over = True
            except RuntimeError as error:
                self._check()
                if time.monotonic() > deadline:
                    raise CommError(
                        f"the other ranks did not make this call within {self._timeout.total_seconds():.0f} s"
                    ) from None
                if time.monotonic() - asked < _LOOK_AFTER.total_seconds() / 2:
                    raise CommError("the store is unreachable: the rank that hosts it has ended") from error


class Meetings:
    """Meetings of one `Comm`, in the same order on every rank."""

    def __init__(self, comm: Accounts, *, timeout: timedelta, store_name: str) -> None:
        self._comm = comm
        self._timeout = timeout
        self._store_name = store_name
        self._store: Any = None
        self._met = 0

    def __call__(self, what: str, *, flag: bool = False) -> bool:
        """Wait until every rank has called the engine's method `what`; return whether any of them passed the
        flag. Raises CommError.

        Called before data is sent, so that a rank that called it alone, and the ranks that did something
        else, all get an error.
        """
        comm = self._comm
        if comm.world_size == 1:
            return flag
        if self._store is None:
            self._store = own_store(self._store_name)
        self._met += 1
        meeting = Meeting(
            self._store,
            number=self._met,
            world_size=comm.world_size,
            timeout=self._timeout,
            check=comm.check,
            flag=flag,
        )
        comm.watch(meeting, f"{CALL}{what}").wait()
        return meeting.any_flag
