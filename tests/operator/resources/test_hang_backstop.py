"""Ranks give up waiting for each other later than the operator ends a hang, since the operator knows the
culprit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jobs import make_job
from zerotrain.contract.progress import Phase
from zerotrain.contract.variables import LAUNCH_VARIABLE
from zerotrain.contract.worker_environment import CommEnv, LaunchSpec, unfolded
from zerotrain.operator.reconcile.hangs import HangLimits
from zerotrain.operator.reconcile.inspection import RankPace
from zerotrain.operator.resources import ResourceOptions, worker_pod

pytestmark = pytest.mark.unit


Json = dict[str, Any]

A_YEAR = 31_536_000
FOUND_S = 15.0 + 60.0 + 160.0
"""Seconds by docs/operator/hangs.md: one look, the wait for stacks, the share of the largest job before."""

COMMAND = {"spec.command": ["python", "train.py"]}


def comm_env(changes: Mapping[str, Any] | None = None) -> CommEnv:
    """Return the environment that the ranks of the job's worker 0 read."""
    (container,) = worker_pod(make_job(changes), 1, 0, ResourceOptions())["spec"]["containers"]
    environ = {item["name"]: item["value"] for item in container["env"]}
    spec = LaunchSpec.from_env(environ)
    # The launcher starts a rank in the same way.
    return CommEnv.from_env({**unfolded(environ), **spec.to_env()})


seconds = st.integers(1, A_YEAR)
times = st.none() | st.floats(0, 1e12)


@given(
    policy=st.fixed_dictionaries(
        {},
        optional={
            "stepTimeoutFactor": st.integers(2, 1000),
            "minTimeoutSeconds": seconds,
            "startupTimeoutSeconds": seconds,
            "firstStepTimeoutSeconds": seconds,
            "checkpointTimeoutSeconds": seconds,
        },
    ),
    phase=st.sampled_from(sorted(Phase)),
    usual_s=times,
    longest_s=times,
    hangs=st.integers(0, 9),
)
def test_no_limit_that_the_operator_may_reach_is_later(
    policy: Json, phase: Phase, usual_s: float | None, longest_s: float | None, hangs: int
) -> None:
    """The policy may be changed while the job runs, so any policy may apply to a pod made before."""
    limit_s = (
        HangLimits.read(policy)
        .after(hangs)
        .of(phase, RankPace(idle_s=0.0, usual_s=usual_s, longest_s=longest_s))
    )
    for found in (
        comm_env(),
        comm_env({"spec.hangPolicy": policy}),
        comm_env({"spec.hangPolicy": {}, **COMMAND}),
    ):
        assert found.watchdog_seconds > limit_s + FOUND_S
        assert found.hang_backstop_seconds is not None
        assert found.hang_backstop_seconds > limit_s + FOUND_S


def test_a_program_that_may_never_report_keeps_the_engines_own_watchdog() -> None:
    """The operator may not judge such a program; a hangPolicy, even an empty one, is its author's statement
    that it reports.
    """
    own = comm_env(COMMAND)
    assert (own.watchdog_seconds, own.hang_backstop_seconds) == (600.0, None)
    policy = {"action": "Report"}
    assert comm_env({**COMMAND, "spec.hangPolicy": policy}).watchdog_seconds > 600.0


def test_a_script_of_zerotrain_launch_reports_by_itself() -> None:
    found = comm_env({"spec.command": ["zerotrain", "launch", "train.py"]})
    assert found.watchdog_seconds > 600.0


@pytest.mark.parametrize("bound", ["0", "90"])
def test_a_bound_that_the_user_gave_stands(bound: str) -> None:
    found = comm_env({"spec.podTemplate.env": [{"name": "ZEROTRAIN_WATCHDOG_SECONDS", "value": bound}]})
    assert found.watchdog_seconds == float(bound)
    assert found.hang_backstop_seconds == comm_env().hang_backstop_seconds


def test_it_costs_the_pod_no_variable() -> None:
    (container,) = worker_pod(make_job(), 1, 0, ResourceOptions())["spec"]["containers"]
    assert [item["name"] for item in container["env"]] == ["HOME", LAUNCH_VARIABLE]
