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

from tests.support.ports import free_port

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 150.0


class ScriptFailed(AssertionError):
    """A rank of a script ended with an error; carries the ends of the ranks' outputs."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Values that one rank recorded."""

    losses: list[float]
    logged: dict[str, list[float]]

    def difference(self, other: Losses) -> float:
        """Return the largest difference of two runs that trained and logged alike: absolute for values below
        1, else relative."""
        assert self.logged.keys() == other.logged.keys()
        pairs = [(self.losses, other.losses), *((self.logged[key], other.logged[key]) for key in self.logged)]
        found = [
            abs(one - two) / max(1.0, abs(two))
            for mine, theirs in pairs
            for one, two in zip(mine, theirs, strict=True)
        ]
        return max(found, default=0.0)


class _Server:
    """The process of `hf_server.py`."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hf_server"],
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


_server: list[_Server] = []


def run_script(
    script: Path,
    folder: Path,
    *arguments: str,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
) -> list[Losses]:
    """Run a script with arguments in a folder on fresh ranks; return what each rank recorded.

    Raises ScriptFailed with the outputs if a rank fails.
    """
    if not _server:
        _server.append(_Server())
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
    statuses = _server[0].ask(request)
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
