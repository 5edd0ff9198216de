"""The shipped operator with a record of its requests: `python -m tests.operator.recorded_operator`.

Every request of the process goes through an aiohttp session, ours and kopf's alike; each session gets a trace
that records the request before it leaves.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import aiohttp

from tests.operator.call_record import FILE_VARIABLE, REFUSALS_VARIABLE, Call, append, call_of, write
from zerotrain.operator.__main__ import start

_FILE, _REFUSALS = Path(os.environ[FILE_VARIABLE]), Path(os.environ[REFUSALS_VARIABLE])
_seen: set[Call] = set()


async def _note(session: object, context: object, params: aiohttp.TraceRequestStartParams) -> None:
    call = call_of(params.method, str(params.url))
    if call is not None and call not in _seen:
        _seen.add(call)
        append(_FILE, call)


async def _note_refusal(session: object, context: object, params: aiohttp.TraceRequestEndParams) -> None:
    if params.response.status == 403 and call_of(params.method, str(params.url)) is not None:
        text = (await params.response.text()).replace("\n", " ")
        write(_REFUSALS, f"{params.method} {params.url.path}: {text}")


def _traced() -> aiohttp.TraceConfig:
    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(_note)
    trace.on_request_end.append(_note_refusal)
    return trace


_open = aiohttp.ClientSession.__init__


def _open_traced(self: aiohttp.ClientSession, *args: Any, **kwargs: Any) -> None:
    traces = [*(kwargs.pop("trace_configs", None) or ()), _traced()]
    _open(self, *args, trace_configs=traces, **kwargs)


aiohttp.ClientSession.__init__ = _open_traced  # type: ignore[method-assign]

if __name__ == "__main__":
    start()
