"""The operator dies at one await point after the other while jobs run, fail, yield and go: no job suffers.

CI's share of `make chaos`: 50 crashes in this process, 5 SIGKILLs, both with planted faults of the API
server.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.chaos.crashes import crash, sigkill
from tests.cluster.chaos.fault_injector import Temper
from tests.cluster.chaos.operator_run import unheard_deaths
from tests.cluster.chaos.scenario import heard_errors, season
from tests.support.devcluster import Cluster

pytestmark = pytest.mark.cluster

SEED = 20260101


def test_fifty_crashes_at_await_points(
    control_plane: Cluster, operator_kubeconfig: Path, tmp_path: Path
) -> None:
    temper = Temper(jobs=3)
    with (
        season(control_plane, operator_kubeconfig, tmp_path, seed=SEED, temper=temper, steps=20) as here,
        heard_errors() as errors,
        unheard_deaths(),
    ):
        record = crash(here, 50)
        promises = here.judge()
        assert [*record.problems, *errors, *promises.complaints] == []
        assert record.crashed.total() == 50, record.report()
        assert len(record.crashed) >= 10, record.report()
        assert here.gremlin.ended["Completed"] >= 3


def test_five_kills_of_the_process(control_plane: Cluster, operator_kubeconfig: Path, tmp_path: Path) -> None:
    temper = Temper(jobs=3)
    with season(control_plane, operator_kubeconfig, tmp_path, seed=SEED, temper=temper, steps=20) as here:
        sigkill(here, 5)
        assert here.judge().complaints == []
        assert here.gremlin.ended["Completed"] >= 2
