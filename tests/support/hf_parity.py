"""Comparison of a training script in the engine's tiers with itself under DDP."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_cases import IN_ALL_TIERS, LEFT_OUT, STEPS, TIERS, Assets, Case, write_config
from tests.support.hf_scripts import Losses, difference, run_script
from tests.support.on_request import ON_REQUEST, runs_all_examples
from tests.support.tiers import with_slow_rows

TOLERANCE = 1e-5


def tiers_of(name: str, case: Case) -> list[str]:
    """Return the tiers in which a case runs here."""
    return list(TIERS) if runs_all_examples() or name in IN_ALL_TIERS else [case.tier]


def rows(cases: Collection[str], *, quick: Collection[str]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`: all but the quick ones are slow, and some are left to
    `make test-hf`."""
    return [
        *with_slow_rows([name for name in cases if name not in LEFT_OUT], quick=quick),
        *(pytest.param(name, marks=ON_REQUEST) for name in cases if name in LEFT_OUT),
    ]


@dataclass(kw_only=True)
class Bench:
    """Assets and folders of runs."""

    folder: Path
    assets: Assets
    differences: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path) -> Bench:
        """Write the assets into a folder."""
        return cls(folder=folder, assets=Assets(folder=folder / "assets").make())

    def run(
        self,
        name: str,
        case: Case,
        tier: str | None,
        *more: str,
        ranks: int = 2,
        deepspeed_python: Path | None = None,
    ) -> list[Losses]:
        """Run a case in a tier, or under DDP for None."""
        folder = self.folder / re.sub(r"\W+", "_", f"{name} {tier} {ranks} {deepspeed_python}")
        arguments = [*self.assets.arguments(case.arguments), *more]
        if tier is not None:
            config = write_config(folder, tier, optimizer="optimizer" in name, schedule="schedule" in name)
            arguments += ["--deepspeed", str(config)]
        return run_script(case.path, folder, *arguments, ranks=ranks, deepspeed_python=deepspeed_python)

    def compare(self, name: str, case: Case, tiers: Sequence[str]) -> None:
        """Assert that a case's losses in each tier are those under DDP, and that tiers which sum gradients in
        the same order agree to the bit."""
        reference = self.run(name, case, None)
        assert all(len(rank.losses) >= STEPS for rank in reference)
        found = {tier: self.run(name, case, tier) for tier in tiers}
        for tier, runs in found.items():
            self.differences[name, tier] = difference(runs, reference)
            print(f"HF | {name} | {tier} | {self.differences[name, tier]:.1e} |")
        assert all(self.differences[name, tier] <= TOLERANCE for tier in tiers), self.differences
        # Stage 1 adds a rank's micro-batches before it reduces, the others afterwards.
        alike = [runs for tier, runs in found.items() if tier != "1"]
        assert all([rank.losses for rank in runs] == [rank.losses for rank in alike[0]] for runs in alike)
