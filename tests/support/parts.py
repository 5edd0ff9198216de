"""Division of the unit tests into parts, one for each process of `pytest -n`.

xdist has every process collect all tests, so that any process may run any test. Unit tests are many and
short: this collection takes a tenth of their time, and each process would load torch. With parts, a process
imports only the files of its own part. The files of a folder need similar modules, so a part is a run of
folders, and all parts have about as many bytes of tests.
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
"""Name of the variable with the number of parts; set by the process that starts the others."""

WITH_TORCH = ("runtime", "native", "cli", "contract")
"""Folders that come first."""


def number_of_parts(config: pytest.Config) -> int:
    """Return the number of parts, for the process that starts the others.

    It is 1 unless all unit tests, and only these, are to run.
    """
    processes = config.getoption("numprocesses", None) or 1
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    expression = config.option.markexpr
    units = all(leaves_out(expression, frozenset({tier})) for tier in TIERS[1:]) if expression else False
    return processes if whole and units and config.getoption("dist", "no") == "loadfile" else 1


def part_of(files: Iterable[Path], number: int, parts: int) -> frozenset[Path]:
    """Return the files of the part with this number, out of so many parts."""
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
    """A scheduler in which a process runs what it has collected."""

    def schedule(self) -> None:
        total = sum(map(len, self.node2collection.values()))
        session: Any = self.config.pluginmanager.getplugin("session")
        session.testscollected = total  # the total of the progress display
        super().schedule()
