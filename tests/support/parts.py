"""Unit tests in parts, one for each process of `pytest -n`, which imports the files of its own part alone.

xdist has every process collect everything, so that any of them may run any test: of unit tests, which are
many and short, that is a tenth of the work, and each process would load torch. What the files need is alike
within a folder, so a part is a run of folders, and all parts have as many bytes of tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import EachScheduling  # type: ignore[import-untyped]

from tests.support.tiers import TIERS, leaves_out

VARIABLE = "ZEROTRAIN_TEST_PARTS"
"""How many parts there are; set for the processes by the one that starts them."""

WITH_TORCH = ("runtime", "native", "cli", "contract")
"""Folders that come first."""


def number_of_parts(config: pytest.Config) -> int:
    """For the process that starts others: 1 unless it is to run all unit tests, and nothing else."""
    processes = config.getoption("numprocesses", None) or 1
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    expression = config.option.markexpr
    units = all(leaves_out(expression, frozenset({tier})) for tier in TIERS[1:]) if expression else False
    return processes if whole and units and config.getoption("dist", "no") == "loadfile" else 1


def part_of(files: Iterable[Path], number: int, parts: int) -> frozenset[Path]:
    """The files of the part with this number, of so many."""
    weights = {file: file.stat().st_size for file in files}
    ordered = sorted(weights, key=_place)
    ends = list(itertools.accumulate(weights[file] for file in ordered))
    middles = [end - weights[file] / 2 for file, end in zip(ordered, ends, strict=True)]
    return frozenset(
        file
        for file, middle in zip(ordered, middles, strict=True)
        if int(parts * middle / ends[-1]) == number
    )


def _place(file: Path) -> tuple[int, str]:
    folder = file.parent.name
    return (WITH_TORCH.index(folder) if folder in WITH_TORCH else len(WITH_TORCH)), str(file)


class EachItsOwn(EachScheduling):  # type: ignore[misc]
    """A process runs what it has collected."""

    def schedule(self) -> None:
        total = sum(map(len, self.node2collection.values()))
        session: Any = self.config.pluginmanager.getplugin("session")
        session.testscollected = total  # which the progress is a share of
        super().schedule()
