"""Two replicas: a leader that stops in the middle of a pass and goes on after another one took over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.chaos.fault_injector import Temper
from tests.cluster.chaos.frozen import freeze_and_thaw
from tests.cluster.chaos.operator_run import unheard_deaths
from tests.cluster.chaos.proxy import CALM
from tests.cluster.chaos.scenario import heard_errors, season
from tests.support.devcluster import Cluster

pytestmark = pytest.mark.cluster


def test_a_leader_that_was_frozen_writes_nothing_after_its_lease(
    control_plane: Cluster, operator_kubeconfig: Path, tmp_path: Path
) -> None:
    temper = Temper(jobs=3)
    with (
        season(
            control_plane, operator_kubeconfig, tmp_path, seed=7, weather=CALM, temper=temper, steps=40
        ) as here,
        heard_errors() as errors,
        unheard_deaths(),
    ):
        places = freeze_and_thaw(here, [4])
        assert len(places) == 1, places
        assert [*errors, *here.judge().complaints] == []
