"""Throughput of the spill store, plain and encrypted, beside DeepSpeed's asynchronous I/O and fio, as ratios.

    make bench-offload                    # or: python -m tests.benchmarks.bench_spill --help

Operations: `write` and `read` pass over all bytes once; `sweep` reads and writes each once, pipelined; `step`
is a sweep with an AdamW update of fp32 state in between, as in training. All contenders use the same folder,
request size and queue depth, and take turns (A B C A B C ...). A figure is the median over the rounds, a
ratio the median of the rounds' ratios. fio uses io_uring; its sweep is rw=rw. `in memory` is the spill
store's own work on tiles that are in the ring: the time that remains when the drive costs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from tests.benchmarks import deepspeed_env
from tests.benchmarks.team import EXTENSIONS, ROOT, drop_stale_locks
from zerotrain.runtime._native import Segment, UpdateTask, aligned_buffer
from zerotrain.runtime.spill.file import SpillPlace
from zerotrain.runtime.spill.seal import Encryption, SpillIdentity
from zerotrain.runtime.spill.sealers import create_sealer
from zerotrain.runtime.spill.store import SpillStore

CHUNK_NUMEL, ELEMENT_BYTES = 16_384, 12
CHUNK_BYTES = CHUNK_NUMEL * ELEMENT_BYTES
PIECE_BYTES = 32 << 20
OPERATIONS = ("write", "read", "sweep", "step")
FIO_MODE = {"write": "write", "read": "read", "sweep": "rw"}
Contender = Callable[[str], float | None]
"""Function that returns the seconds of an operation, or None if the contender does not have it."""


class Ours:
    """A spill store of two records: one is written with any bytes, the other holds states for AdamW."""

    def __init__(self, encryption: Encryption, folder: Path, options: argparse.Namespace) -> None:
        identity = SpillIdentity(job="bench", rank=0, world_size=1)
        self.sealer = create_sealer(encryption, identity)
        place = SpillPlace(
            folders=(folder,),
            engine=options.engine,
            queue_depth=options.queue_depth,
            request_bytes=options.request_kib << 10,
        )
        self.spill_store = SpillStore(place, sealer=self.sealer, identity=identity)
        chunks = [CHUNK_BYTES] * ((options.mib << 20) // CHUNK_BYTES)
        self.record = self.spill_store.add("bytes", chunks, layout="f32,f32,f32")
        self.states = self.spill_store.add("states", chunks, layout="f32,f32,f32")
        self.spill_store.allocate()
        numel = len(chunks) * CHUNK_NUMEL
        self.template = torch.randn(64 * CHUNK_BYTES // 4).square_().mul_(1e-3).view(torch.uint8)
        self.segment = Segment(0, numel, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=10)
        self.grad = torch.randn(numel, dtype=torch.bfloat16)
        self.weight = torch.zeros(numel, dtype=torch.bfloat16)
        with self.spill_store.sweep(self.states.tiles(), writes=True, reads=False) as sweep:
            for tile in sweep:
                tile.data.copy_(self.template[: tile.data.numel()])
                tile.seal()

    def __call__(self, operation: str) -> float | None:
        started = time.perf_counter()
        {"write": self.write, "read": self.read, "sweep": self.sweep, "step": self.step}[operation]()
        return time.perf_counter() - started

    def write(self) -> None:
        """Write the buffers as they are; the first time the file gets its blocks."""
        with self.spill_store.sweep(self.record.tiles(), writes=True, reads=False) as sweep:
            for tile in sweep:
                tile.seal()

    def read(self) -> None:
        """Read, verify and decrypt all tiles."""
        with self.spill_store.sweep(self.record.tiles(), writes=False) as sweep:
            for tile in sweep:
                tile.open()

    def sweep(self) -> None:
        """Open all tiles and seal them again."""
        with self.spill_store.sweep(self.record.tiles(), writes=True) as sweep:
            for tile in sweep:
                tile.open()
                tile.seal()

    def step(self) -> None:
        """Open, update and seal all tiles, chunk by chunk."""
        task = UpdateTask("adamw", [self.segment], self.grad, self.weight)
        with self.spill_store.sweep(self.states.tiles(), writes=True) as sweep:
            for tile in sweep:
                tile.update(task)

    def in_memory(self) -> float:
        """Return the seconds of a step's own work, without the drive.

        Call it last: the tile that it seals again is not written, so the drive then holds an old generation.
        """
        ref = self.states.tiles()[0]
        data = aligned_buffer(ref.num_bytes)
        task = UpdateTask("adamw", [self.segment], self.grad, self.weight)
        tiles = len(self.states.tiles())
        data.copy_(self.template[: data.numel()])
        batch = ref.batch(data)
        self.sealer.seal(batch)
        started = time.perf_counter()
        for _ in range(tiles):
            self.sealer.update(batch, task)
        return time.perf_counter() - started


class DeepSpeed:
    """DeepSpeed's I/O handle in its own process."""

    def __init__(self, python: Path, folder: Path, options: argparse.Namespace) -> None:
        task = {
            "folder": str(folder),
            "num_bytes": (options.mib << 20) // PIECE_BYTES * PIECE_BYTES,
            "piece_bytes": PIECE_BYTES,
            "request_bytes": options.request_kib << 10,
            "queue_depth": options.queue_depth,
            "threads": options.deepspeed_threads,
        }
        environment = os.environ | {
            "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
            "PYTHONWARNINGS": "ignore",
        }
        drop_stale_locks()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        self.process = subprocess.Popen(
            [str(python), "-m", "tests.benchmarks.spill_peer", json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.answer()

    def __call__(self, operation: str) -> float | None:
        if operation == "step":
            return None
        assert self.process.stdin is not None
        self.process.stdin.write(operation + "\n")
        self.process.stdin.flush()
        return float(self.answer())

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            raise deepspeed_env.DeepSpeedMissing(
                "DeepSpeed's async_io does not run here; building it needs Debian's libaio-dev and g++. It "
                "said:\n" + self.log.read()[-2000:]
            )
        return line

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def fio(folder: Path, options: argparse.Namespace) -> Contender:
    """Return fio as a contender: seconds by its own clock, scaled to the bytes that the others move."""

    def run(operation: str) -> float | None:
        if operation not in FIO_MODE:
            return None
        command = [
            "fio", "--name=bench", f"--filename={folder / 'fio'}", f"--size={options.mib}M", "--direct=1",
            "--ioengine=io_uring", f"--bs={options.request_kib}k", f"--iodepth={options.queue_depth}",
            f"--rw={FIO_MODE[operation]}", "--fallocate=none", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        wanted = (options.mib << 20) * (2 if operation == "sweep" else 1)
        seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
        return float(seconds * wanted / moved)

    return run


def run_alternately(contenders: Mapping[str, Contender], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds by contender and operation, one per round.

    Every contender writes its files once before.
    """
    for name, contender in contenders.items():
        print(f"filling the files of {name}", file=sys.stderr, flush=True)
        contender("write")
    found: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    for round_index in range(rounds):
        print(f"round {round_index + 1} of {rounds}", file=sys.stderr, flush=True)
        for operation in OPERATIONS:
            for name, contender in contenders.items():
                seconds = contender(operation)
                if seconds is not None:
                    found[name].setdefault(operation, []).append(seconds)
    return found


def report(found: Mapping[str, Mapping[str, Sequence[float]]], num_bytes: int) -> None:
    print(f"\n{'GB/s (read + written)':24}" + "".join(f"{operation:>9}" for operation in OPERATIONS))
    for name, by_operation in found.items():
        cells = []
        for operation in OPERATIONS:
            seconds = by_operation.get(operation)
            moved = num_bytes * (2 if operation in {"sweep", "step"} else 1) / 1e9
            cells.append(f"{moved / statistics.median(seconds):9.2f}" if seconds else f"{'-':>9}")
        print(f"{name:24}" + "".join(cells))
    print("\ntime ratios: median (lowest-highest)")
    for mine, my_operation, peer, peer_operation, limit in (
        ("zerotrain AEAD", "write", "fio", "write", None),
        ("zerotrain AEAD", "read", "fio", "read", None),
        ("zerotrain None", "sweep", "fio", "sweep", None),
        ("zerotrain AEAD", "sweep", "fio", "sweep", None),
        ("zerotrain AEAD", "step", "fio", "sweep", None),
        ("zerotrain AEAD", "write", "deepspeed", "write", 1.0),
        ("zerotrain AEAD", "read", "deepspeed", "read", 1.0),
        ("zerotrain AEAD", "step", "deepspeed", "sweep", 1.0),
        ("zerotrain AEAD", "sweep", "zerotrain None", "sweep", None),
        ("zerotrain AEAD", "step", "zerotrain None", "step", encryption_limit()),
    ):
        pair = found.get(mine, {}).get(my_operation), found.get(peer, {}).get(peer_operation)
        if pair[0] is None or pair[1] is None:
            continue
        ratios = sorted(a / b for a, b in zip(pair[0], pair[1], strict=True))
        middle = statistics.median(ratios)
        result = "" if limit is None else f"target {limit:.2f}: {'met' if middle <= limit else 'MISSED'}"
        print(
            f"{mine} {my_operation:6}/ {peer} {peer_operation:6} {middle:5.2f} "
            f"({ratios[0]:.2f}-{ratios[-1]:.2f})  {result}"
        )


def encryption_limit() -> float:
    """Return 1.10 with OpenSSL 3.2 or the wheel, whose AES uses wider vectors; 1.25 with 3.0."""
    identity = SpillIdentity(job="bench", rank=0, world_size=1)
    backend = create_sealer(Encryption.AEAD, identity).info.backend
    return 1.25 if backend.startswith(("OpenSSL 3.0", "OpenSSL 3.1")) else 1.10


def report_ours(ours: Sequence[Ours]) -> None:
    for one in ours:
        info = one.spill_store.info
        print(
            f"encryption {info.encryption} by {info.backend}; engine {info.engine} "
            f"({info.engine_reason or 'the best'}); O_DIRECT {info.is_direct} {info.direct_reason}; "
            f"ring {one.spill_store.memory.ring >> 20} MiB; waited {one.spill_store.totals.wait_s:.1f} of "
            f"{one.spill_store.totals.total_s:.1f} s for the drive"
        )
        moved = 2 * one.record.num_bytes / 1e9
        print(f"  in memory, a step would run at {moved / one.in_memory():.1f} GB/s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "mib": 480,
        "rounds": 5,
        "queue-depth": 32,
        "request-kib": 1024,
        "deepspeed-threads": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--folder", type=Path, help="on the drive to measure; default: the temporary folder")
    parser.add_argument("--engine", default="auto", help="of the spill store: io_uring, libaio or threads")
    parser.add_argument("--deepspeed-python", type=Path, help="interpreter that has DeepSpeed")
    parser.add_argument("--without-deepspeed", action="store_true")
    parser.add_argument("--json", type=Path, help="write every measured value there")
    return parser.parse_args()


def main() -> int:
    options = parse()
    contenders: dict[str, Contender] = {}
    peer: DeepSpeed | None = None
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if shutil.which("fio"):
            contenders["fio"] = fio(folder, options)
        else:
            print("fio is not installed (Debian: fio): left out", file=sys.stderr)
        if not options.without_deepspeed:
            try:
                python = options.deepspeed_python or deepspeed_env.find_or_make()
                peer = DeepSpeed(python, folder, options)
                contenders["deepspeed"] = peer
            except deepspeed_env.DeepSpeedMissing as error:
                print(error, file=sys.stderr)
                return 1
        ours = [Ours(encryption, folder, options) for encryption in (Encryption.NONE, Encryption.AEAD)]
        contenders |= {"zerotrain None": ours[0], "zerotrain AEAD": ours[1]}
        found = run_alternately(contenders, options.rounds)
        report(found, ours[0].record.num_bytes)
        report_ours(ours)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
        if peer is not None:
            peer.close()
        for one in ours:
            one.spill_store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
