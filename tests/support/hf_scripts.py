"""Runs training scripts as two ranks, each with the libraries already imported, and returns their losses."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import hf_server
from tests.support.hf_records import RATE
from tests.support.ports import free_port

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 150.0


class ScriptFailed(AssertionError):
    """A rank of a script ended with an error; carries the ends of the ranks' outputs."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Values that one rank recorded."""

    losses: list[float]
    times: list[float]
    """Seconds of the clock before each backward pass."""
    logged: dict[str, list[float]]

    def difference(self, other: Losses) -> float:
        """Return the largest difference of two runs that trained and logged alike, as `apart`.

        Rates are left out: of a schedule that the engine steps, as DeepSpeed does, the Trainer logs the next.
        """
        assert self.logged.keys() == other.logged.keys()
        keys = [key for key in self.logged if key != RATE]
        pairs = [(self.losses, other.losses), *((self.logged[key], other.logged[key]) for key in keys)]
        return max(apart(mine, theirs) for mine, theirs in pairs)


def apart(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference: absolute for values below 1, else relative."""
    pairs = zip(values, others, strict=True)
    return max((abs(one - two) / max(1.0, abs(two)) for one, two in pairs), default=0.0)


class _Server:
    """The process of `hf_server.py`."""

    def __init__(self, deepspeed_python: Path | None) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}",
            **({hf_server.REAL_DEEPSPEED: "1", "DS_ACCELERATOR": "cpu"} if deepspeed_python else {}),
        }
        self._process = subprocess.Popen(
            [deepspeed_python or sys.executable, "-m", "tests.support.hf_server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.kill)
        self._answer()

    def ask(self, request: Mapping[str, object]) -> list[int]:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        statuses: list[int] = json.loads(self._answer())
        return statuses

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ScriptFailed("the process with the training libraries ended")
        return line


_servers: dict[Path | None, _Server] = {}


def run_script(
    script: Path,
    folder: Path,
    *arguments: str,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    deepspeed_python: Path | None = None,
) -> list[Losses]:
    """Run a script with arguments in a folder on fresh ranks; return what each rank recorded.

    `deepspeed_python` is an interpreter that has DeepSpeed, which then takes the place of this engine. Raises
    ScriptFailed with the outputs if a rank fails.
    """
    if deepspeed_python not in _servers:
        _servers[deepspeed_python] = _Server(deepspeed_python)
    folder.mkdir(parents=True, exist_ok=True)
    request = {
        "script": str(script),
        "arguments": list(arguments),
        "folder": str(folder),
        "ranks": ranks,
        "port": free_port(),
        "environment": dict(environment or {}),
        "timeout_s": TIMEOUT_S,
    }
    statuses = _servers[deepspeed_python].ask(request)
    if any(statuses):
        raise ScriptFailed(_outputs(folder, statuses))
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return [Losses(**record) for record in found]


def difference(runs: Sequence[Losses], others: Sequence[Losses]) -> float:
    """Return the largest difference between the losses of two runs on the same ranks."""
    return max(one.difference(two) for one, two in zip(runs, others, strict=True))


def _outputs(folder: Path, statuses: Sequence[int]) -> str:
    texts = [f"wait statuses {list(statuses)}"]
    for rank in range(len(statuses)):
        texts += [f"--- rank {rank}", (folder / f"rank{rank}.log").read_text()[-6000:]]
    return "\n".join(texts)
