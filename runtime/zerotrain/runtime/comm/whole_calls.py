"""Rendezvous in the store for engine calls that all ranks must make together, before any data is sent.

Otherwise a rank that saves a checkpoint alone would send the sizes of its files to ranks that expect weights.
The watchdog watches this wait like those for collectives, so both sides get an error that says which rank
called what. Ranks that meet under different names get that error at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from zerotrain.contract.strict_json import strict_json
from zerotrain.runtime.comm.accounts import Accounts
from zerotrain.runtime.comm.mismatch import CALL, STORE_GONE, CommError, different_calls
from zerotrain.runtime.comm.watchdog import check_group, own_store
from zerotrain.runtime.comm.work import LOOK_AFTER, Ready

_FLAG = 1 << 32
"""Number that a rank with a flag adds to the count of those that arrived, beside itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of the engine on one rank."""

    number: int
    """Number of the meeting."""
    rank: int
    what: str
    flag: bool


class Meeting(Ready):
    """Handle whose wait ends when every rank has arrived."""

    def __init__(
        self,
        store: Any,
        called: Call,
        *,
        world_size: int,
        timeout: timedelta,
        check: Callable[[], None],
        patience: timedelta | None = None,
    ) -> None:
        """Announce this rank's call. `check` is called repeatedly during a wait, and may raise; the wait ends
        without the others after `patience`, if given."""
        super().__init__(self._until_all)
        self._store, self._called = store, called
        self._timeout, self._check, self._patience = timeout, check, patience
        key = f"zerotrain-meeting/{called.number}"
        self._all = f"{key}/all"
        store.set(f"{key}/{called.rank}", called.what)
        num_flags, num_arrived = divmod(store.add(key, 1 + _FLAG * called.flag), _FLAG)
        self.any_flag: bool = num_flags > 0
        """Whether any rank has the flag; of all ranks once the meeting is over."""
        if num_arrived == world_size:
            names = [
                name.decode() for name in store.multi_get([f"{key}/{rank}" for rank in range(world_size)])
            ]
            is_same = len(set(names)) == 1
            store.set(self._all, str(int(self.any_flag)) if is_same else json.dumps(names))
        self._is_over = False

    def is_completed(self) -> bool:
        """Return whether the wait is over."""
        return self._is_over

    def _until_all(self) -> None:
        """Block until every rank has arrived. Raises CommError."""
        began = time.monotonic()
        deadline = began + self._timeout.total_seconds()
        while not self._is_over:
            asked = time.monotonic()
            try:
                self._store.wait([self._all], LOOK_AFTER)
                found = strict_json(self._store.get(self._all).decode())
            except RuntimeError as error:
                self._check()
                if self._patience is not None and time.monotonic() > began + self._patience.total_seconds():
                    self._is_over = True  # for the watchdog, which would wait for it on a device
                    return
                if time.monotonic() > deadline:
                    raise CommError(
                        f"the other ranks did not make this call within {self._timeout.total_seconds():.0f} s"
                    ) from None
                if time.monotonic() - asked < LOOK_AFTER.total_seconds() / 2:
                    raise CommError(f"another rank ended or left: {STORE_GONE}") from error
                continue
            self._is_over = True
            if isinstance(found, list):
                raise CommError(different_calls(self._called.rank, found))
            self.any_flag = found == 1


class Meetings:
    """Meetings of one `Comm`, in the same order on every rank."""

    def __init__(self, comm: Accounts, *, timeout: timedelta, store_name: str) -> None:
        self._comm = comm
        self._timeout = timeout
        self._store_name = store_name
        self._store: Any = None
        self._met = 0

    def __call__(self, what: str, *, flag: bool = False, patience: timedelta | None = None) -> bool:
        """Wait until every rank has called the engine's method `what`, or for `patience`; return whether any
        of them passed the flag. Raises CommError.

        Called before data is sent, so that a rank that called it alone, and the ranks that did something
        else, all get an error.
        """
        comm = self._comm
        if comm.world_size == 1:
            return flag
        check_group()
        if self._store is None:
            self._store = own_store(self._store_name)
        self._met += 1
        meeting = Meeting(
            self._store,
            Call(number=self._met, rank=comm.rank, what=what, flag=flag),
            world_size=comm.world_size,
            timeout=self._timeout,
            check=comm.check,
            patience=patience,
        )
        comm.watch(meeting, f"{CALL}{what}").wait()
        return meeting.any_flag
