"""Conditions that end a wait."""

from __future__ import annotations

import pytest

from tests.support.job_states import condition, job
from zerotrain.client import Job, JobFailedError
from zerotrain.client.command_exits import CommandExit
from zerotrain.client.waiting import wait_for

pytestmark = pytest.mark.unit


def stalled() -> Job:
    why = condition("Stalled", "True", "MemoryPlanTooLarge", "needs 80 GiB\x1b[2J of 40")
    return job({"phase": "Stalled", "conditions": [why]})


@pytest.mark.parametrize("goal", ["complete", "failed", "finished", "running", "step=100"])
def test_a_job_that_waits_for_its_spec_to_be_corrected_ends_a_wait(goal: str) -> None:
    states: list[Job | None] = [job({"phase": "Pending"}), stalled(), job({"phase": "Completed"})]
    with pytest.raises(
        JobFailedError, match=r"is Stalled, not .*: MemoryPlanTooLarge: needs 80 GiB"
    ) as found:
        wait_for(iter(states), "gpt", until=goal, timeout_s=None)
    assert found.value.exit_code is CommandExit.JOB_FAILED
    assert "describe gpt" in (found.value.next_step or "")


def test_what_is_still_to_come_is_waited_for() -> None:
    corrected = job({"phase": "Running", "conditions": [condition("Fits", "True", "Fits")]})
    assert wait_for(iter([stalled(), corrected]), "gpt", until="Fits", timeout_s=None) is corrected
    assert wait_for(iter([stalled(), None]), "gpt", until="deleted", timeout_s=None).phase == "Stalled"
    assert wait_for(iter([stalled()]), "gpt", until="Stalled", timeout_s=None).phase == "Stalled"


def test_a_spec_that_was_just_corrected_is_no_longer_what_it_stalled_for() -> None:
    old = stalled()
    corrected = Job.of({**old.raw, "metadata": {**old.raw["metadata"], "generation": 2}})
    done = job({"phase": "Completed"})
    assert wait_for(iter([corrected, done]), "gpt", until="complete", timeout_s=None) is done
