"""Workers that only answer `GET /progress`: one process for all of them. For bench_operator.

    python -m tests.benchmarks.bench_operator_workers < workers.json

Standard input is one line of JSON, a list of {address, job, uid}: each worker listens on a loopback address
of its own, on the port of the contract, so that the operator polls a thousand real HTTP servers. Every
further line is answered with the number of reports so far.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time

from zerotrain.contract.progress import Phase, Progress
from zerotrain.contract.worker_environment import WORKER_HTTP_PORT
from zerotrain.contract.worker_http import WorkerReport

STEP_S = 1.0


class Workers:
    """All workers; a report advances with the clock, as a training does."""

    def __init__(self) -> None:
        self.answered = 0
        self._started = time.time()

    async def listen(self, address: str, job: str, uid: str) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while (await reader.readline()) and await _headers_end(reader):
                body = self._report(job, uid).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                self.answered += 1
            writer.close()

        await asyncio.start_server(serve, address, WORKER_HTTP_PORT)

    def _report(self, job: str, uid: str) -> str:
        now = time.time()
        step = int((now - self._started) / STEP_S) + 1
        progress = Progress(
            rank=0,
            attempt=1,
            phase=Phase.STEP,
            step=step,
            total_steps=1_000_000,
            loss=5.0 / step,
            tokens_per_second=1000.0,
            step_seconds=STEP_S,
            step_at=self._started + (step - 1) * STEP_S,
            heartbeat_at=now,
        )
        return WorkerReport(
            job=job, job_uid=uid, attempt=1, node_rank=0, world_size=1, ready=True, ranks=(progress,)
        ).to_json()


async def _headers_end(reader: asyncio.StreamReader) -> bool:
    while line := await reader.readline():
        if line == b"\r\n":
            return True
    return False


async def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    workers = Workers()
    for item in json.loads(sys.stdin.readline()):
        await workers.listen(item["address"], item["job"], item["uid"])
    print("listening", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(workers.answered, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
