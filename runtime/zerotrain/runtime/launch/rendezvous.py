"""Waits until the name of rank 0's pod resolves: DNS records appear a few seconds after the pods."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

Resolve = Callable[[str, int], object]
"""Blocks until the name resolves; raises OSError when it does not."""


class RendezvousTimeout(Exception):
    """Raised when the name did not resolve in time (exit code RENDEZVOUS_TIMEOUT)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPace:
    """Pauses between two attempts."""

    first_s: float = 0.2
    factor: float = 1.5
    longest_s: float = 3.0


def resolve_name(host: str, port: int) -> object:
    """Return the system resolver's answer, of any address family."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


async def wait_for_name(
    host: str, port: int, *, timeout_s: float, resolve: Resolve = resolve_name, pace: RetryPace | None = None
) -> None:
    """Return once `host` resolves. Raises RendezvousTimeout naming it, the time and the last error."""
    pace = pace or RetryPace()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    pause = pace.first_s
    last_error: BaseException | None = None
    while (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait_for(_in_daemon_thread(resolve, host, port), left)
            return
        except (OSError, TimeoutError) as error:
            last_error = error
        await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
        pause = min(pause * pace.factor, pace.longest_s)
    raise RendezvousTimeout(
        f"MASTER_ADDR {host!r} did not resolve within {timeout_s:g} s (last answer: {last_error}); "
        f"look for the pod of worker 0 and the job's Service"
    )


async def _in_daemon_thread(resolve: Resolve, host: str, port: int) -> None:
    """Run the blocking resolver so that neither a signal nor the end of the launcher has to wait for it."""
    answer: Future[object] = Future()
    answer.set_running_or_notify_cancel()  # so that a wait that is given up leaves the thread its future

    def work() -> None:
        try:
            answer.set_result(resolve(host, port))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="zerotrain-resolve", daemon=True).start()
    await asyncio.wrap_future(answer)
