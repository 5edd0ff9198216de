"""Choice of the worker whose end explains the attempt's, and the time for which that end is awaited."""

from __future__ import annotations

import pytest

from tests.operator.reconcile.test_failures import END_ALL, failing
from tests.operator.reconcile_builders import (
    Row,
    Want,
    check,
    ended,
    last_words,
    ready,
)

pytestmark = pytest.mark.unit


BLAME = [
    failing(
        ended(0, 1, s_ago=9),
        ended(1, 65, s_ago=2),
        id="a code that only its own rank can cause outweighs an earlier plain failure",
        want=Want(phase="Failed", fields={"failures.0.pod": "gpt-1-1", "failures.0.exitCode": 65}),
    ),
    failing(
        ended(0, 1, s_ago=9),
        ended(1, 137, s_ago=5),
        id="a killed rank outweighs the peers that lost it",
        want=Want(fields={"failures.0.pod": "gpt-1-1", "failures.0.exitCode": 137}),
    ),
    failing(
        ended(0, 1, s_ago=2),
        ended(1, 1, s_ago=4),
        id="among equals the first",
        want=Want(fields={"failures.0.pod": "gpt-1-1"}),
    ),
    *(
        failing(
            ended(0, 1, s_ago=later, termination=last_words(1, exception=words)),
            ended(1, 42, s_ago=2, termination=last_words(42, exception="ValueError: bad batch")),
            id=f"who lost a peer is not the cause: {words}, {later}",
            want=Want(fields={"failures.0.pod": "gpt-1-1", "failures.0.exitCode": 42}),
        )
        for later in (2, 3)
        for words in (
            "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:41172",
            "CommError: all_gather for 'h.0' failed, most likely because another rank ended: x",
            "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed possibly due to "
            "a network error or a remote process exiting prematurely.",
        )
    ),
    failing(
        ended(0, 1, s_ago=2, termination=last_words(1, exception="OSError: Broken pipe")),
        ended(1, 1, s_ago=4, termination=last_words(1, exception="OSError: Broken pipe")),
        id="where all have lost one, the first",
        want=Want(fields={"failures.0.pod": "gpt-1-1"}),
    ),
    failing(
        ended(0, 1, s_ago=0.1),
        ready(1),
        id="a lone plain failure waits half a second for better evidence",
        want=Want(phase="Running", actions=(), events=(), wake_in_s=0.4),
    ),
    failing(
        ended(0, 137, s_ago=0.1),
        ready(1),
        id="a killed rank needs no waiting",
        want=Want(phase="Restarting", actions=END_ALL),
    ),
    failing(
        ended(0, 1, s_ago=4),
        ended(1, 134, s_ago=2),
        id="an abort, as of a collective's watchdog, outweighs nothing that was earlier",
        want=Want(fields={"failures.0.pod": "gpt-1-0", "failures.0.exitCode": 1}),
    ),
    failing(
        ended(0, 134, s_ago=0.1),
        ready(1),
        id="a lone abort waits for the end that it echoes, which another kubelet has yet to tell",
        want=Want(phase="Running", actions=(), events=(), wake_in_s=2.4),
    ),
    *(
        failing(
            ended(0, code, s_ago=2, termination=last_words(code, exception=words)),
            ready(1),
            id=f"so does any other echo: {code}, {words}",
            want=Want(phase="Running", actions=(), events=(), wake_in_s=0.5),
        )
        for code, words in ((1, "OSError: Broken pipe"), (82, "no peer"), (143, ""))
    ),
    failing(
        ended(0, 1, s_ago=2, termination=last_words(1, exception="OSError: Broken pipe")),
        ended(1, 137, s_ago=0, exit_reason="OOMKilled"),
        id="the end that was echoed is the cause as soon as it is told",
        want=Want(
            phase="Restarting", fields={"failures.0.pod": "gpt-1-1", "failures.0.reason": "OutOfMemory"}
        ),
    ),
    failing(
        ended(0, 67, s_ago=0, termination=last_words(67, exception="OSError: Broken pipe")),
        ready(1),
        id="a sure cause waits for nothing, whatever its words",
        want=Want(phase="Failed"),
    ),
    failing(
        ended(0, 134),
        ready(1),
        id="an abort that stands alone is a kill",
        want=Want(actions=END_ALL, fields={"failures.0.reason": "Killed", "restarts.app": 1}),
    ),
    failing(
        ended(0, 1),
        ended(1, 143),
        id="a SIGTERM is an echo",
        want=Want(fields={"failures.0.pod": "gpt-1-0"}),
    ),
    failing(
        ended(0, 1, termination=last_words(-1, last_line="Traceback: own program")),
        ended(1, 1),
        id="the last line of a program of the user's own is shown",
        want=Want(
            fields={"failures.0.lastLine": "Traceback: own program"},
            messages={"event": "Traceback: own program"},
        ),
    ),
    failing(
        ended(0, 137),
        ready(1),
        id="with several ranks per worker an unknown rank stays unknown",
        spec={"ranksPerWorker": 2},
        want=Want(fields={"failures.0.rank": None, "failures.0.pod": "gpt-1-0"}),
    ),
]


@pytest.mark.parametrize("row", BLAME, ids=lambda row: row.id)
def test_blame(row: Row) -> None:
    check(row)
