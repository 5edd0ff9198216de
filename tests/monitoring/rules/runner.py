"""Runner of promtool on many test files at once: one process, because its start costs more than most
tests.
"""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.monitoring.rules.rulebook import Rule, rule_file


class Tested(Protocol):
    """Series, and what promtool has to find in them."""

    @property
    def name(self) -> str: ...

    def document(self, rule_file: str) -> str:
        """Return the promtool test file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Rules and the cases to run against them; passes when every case does."""

    name: str
    """Name that is valid as a file name."""
    rules: Sequence[Rule]
    cases: Sequence[Tested]


def outcomes(
    promtool: Path, folder: Path, trials: Iterable[Trial], *, workers: int = 2, timeout_s: float = 1200.0
) -> dict[str, str]:
    """Return what promtool reported for each trial; "" where it passed."""
    trials = list(trials)
    files: list[Path] = []
    owner: dict[str, str] = {}
    for trial in trials:
        rules = folder / f"{trial.name}.rules.json"
        rules.write_text(rule_file(trial.rules))
        for index, case in enumerate(trial.cases):
            path = folder / f"{trial.name}.{index}.test.json"
            path.write_text(case.document(rules.name))
            files.append(path)
            owner[path.name] = f"{trial.name}\0{case.name}"
    failures = {trial.name: "" for trial in trials}
    shares = [share for start in range(workers) if (share := files[start::workers])]
    running = [_start(promtool, share, folder / f"report-{start}.xml") for start, share in enumerate(shares)]
    for start, process in enumerate(running):
        output, _ = process.communicate(timeout=timeout_s)
        report = folder / f"report-{start}.xml"
        if not report.exists():
            raise AssertionError(f"promtool wrote no report: {output[-2000:]}")
        for name, text in _failures(report):
            trial_name, case_name = owner.pop(name).split("\0")
            if text:
                failures[trial_name] += f"[{case_name}] {text}\n"
    if owner:
        raise AssertionError(f"promtool said nothing on {sorted(owner)[:3]} and {len(owner)} in all")
    return failures


def _start(promtool: Path, files: Sequence[Path], report: Path) -> subprocess.Popen[str]:
    # The names stay relative: thousands of absolute ones would exceed the limit of a command line.
    names = [file.name for file in files]
    command = [str(promtool), "test", "rules", f"--junit={report.name}", *names]
    return subprocess.Popen(
        command, cwd=report.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _failures(report: Path) -> list[tuple[str, str]]:
    """Return (file, promtool's complaint) for every failure in the report."""
    suites = ElementTree.parse(report).getroot()  # our own promtool wrote it
    return [
        (
            Path(suite.get("name", "")).name,
            "\n".join(found.text or "failed" for found in suite.iter() if found.tag in ("failure", "error")),
        )
        for suite in suites
    ]
