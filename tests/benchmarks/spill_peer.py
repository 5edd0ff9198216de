"""DeepSpeed's asynchronous I/O in its own process: reads one operation per line, answers with its seconds.

bench_spill starts it with the interpreter of DeepSpeed's environment. The sweep works like its
PipelinedOptimizerSwapper with pipeline_read and pipeline_write: two handles; the next piece is read and the
last one written while one is held; nothing is computed in between.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class Peer:
    """Files of `piece_bytes`, as its swapper keeps one per tensor, and four pinned buffers."""

    def __init__(self, task: dict[str, Any]) -> None:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found, unused-ignore]

        aio = AsyncIOBuilder().load()
        handles = [
            aio.aio_handle(
                block_size=task["request_bytes"],
                queue_depth=task["queue_depth"],
                single_submit=False,
                overlap_events=True,
                intra_op_parallelism=task["threads"],
            )
            for _ in range(2)
        ]
        self.reader, self.writer = handles
        count = task["num_bytes"] // task["piece_bytes"]
        self.paths = [str(Path(task["folder"]) / f"piece{i}") for i in range(count)]
        like = torch.empty(0, dtype=torch.uint8)
        self.buffers = [self.reader.new_cpu_locked_tensor(task["piece_bytes"], like) for _ in range(4)]
        for buffer in self.buffers:
            buffer.random_(0, 256)

    def write(self) -> None:
        """Write every piece; submit the next one while the last is in flight."""
        for i, path in enumerate(self.paths):
            if i:
                self.writer.wait()
            self.writer.async_pwrite(self.buffers[i % 4], path, 0)
        self.writer.wait()

    def read(self) -> None:
        """Read every piece; submit the next one while the last is in flight."""
        for i, path in enumerate(self.paths):
            if i:
                self.reader.wait()
            self.reader.async_pread(self.buffers[i % 4], path, 0)
        self.reader.wait()

    def sweep(self) -> None:
        """Read and write every piece once."""
        self.reader.async_pread(self.buffers[0], self.paths[0], 0)
        for i, path in enumerate(self.paths):
            self.reader.wait()
            if i + 1 < len(self.paths):
                self.reader.async_pread(self.buffers[(i + 1) % 4], self.paths[i + 1], 0)
            if i:
                self.writer.wait()
            self.writer.async_pwrite(self.buffers[i % 4], path, 0)
        self.writer.wait()


def main() -> None:
    # Output of compilers and logs goes to stderr, as stdout is for the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    peer = Peer(json.loads(sys.argv[1]))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        {"write": peer.write, "read": peer.read, "sweep": peer.sweep}[line.strip()]()
        print(json.dumps(time.perf_counter() - started), file=answers, flush=True)


if __name__ == "__main__":
    main()
