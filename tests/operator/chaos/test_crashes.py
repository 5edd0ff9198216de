"""The operator dies at one await point after the other while jobs run, fail, yield and go: no job suffers.

CI's share of `make chaos`: 50 crashes in this process, 5 SIGKILLs, both with planted faults of the API
server.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.chaos.crashes import crash, sigkill
from tests.cluster.chaos.fault_injector import Temper
from tests.cluster.chaos.operator_run import ignore_unraisable_errors
from tests.cluster.chaos.scenario import collect_errors, open_scenario
from tests.support.devcluster import Cluster

pytestmark = pytest.mark.cluster

SEED = 20260101


def test_fifty_crashes_at_await_points(
    control_plane: Cluster, operator_kubeconfig: Path, tmp_path: Path
) -> None:
    temper = Temper(jobs=3)
    with (
        open_scenario(
            control_plane, operator_kubeconfig, tmp_path, seed=SEED, temper=temper, steps=20
        ) as here,
        collect_errors() as errors,
        ignore_unraisable_errors(),
    ):
        record = crash(here, 50)
        promises = here.check()
        assert [*record.problems, *errors, *promises.complaints] == []
        assert record.crashed.total() == 50, record.report()
        assert len(record.crashed) >= 10, record.report()
        assert here.fault_injector.ended["Completed"] >= 3


def test_five_kills_of_the_process(control_plane: Cluster, operator_kubeconfig: Path, tmp_path: Path) -> None:
    temper = Temper(jobs=3)
    with open_scenario(
        control_plane, operator_kubeconfig, tmp_path, seed=SEED, temper=temper, steps=20
    ) as here:
        sigkill(here, 5)
        assert here.check().complaints == []
        assert here.fault_injector.ended["Completed"] >= 2
