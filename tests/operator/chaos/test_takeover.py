"""Two replicas: a leader that stops in the middle of a pass and goes on after another one took over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.chaos.fault_injector import Temper
from tests.cluster.chaos.frozen import freeze_and_thaw
from tests.cluster.chaos.operator_run import ignore_unraisable_errors
from tests.cluster.chaos.proxy import CALM
from tests.cluster.chaos.scenario import collect_errors, open_scenario
from tests.support.devcluster import Cluster

pytestmark = pytest.mark.cluster


def test_a_leader_that_was_frozen_writes_nothing_after_its_lease(
    control_plane: Cluster, operator_kubeconfig: Path, tmp_path: Path
) -> None:
    temper = Temper(jobs=3)
    with (
        open_scenario(
            control_plane, operator_kubeconfig, tmp_path, seed=7, fault_rates=CALM, temper=temper, steps=40
        ) as here,
        collect_errors() as errors,
        ignore_unraisable_errors(),
    ):
        places = freeze_and_thaw(here, [4])
        assert len(places) == 1, places
        assert [*errors, *here.check().complaints] == []
