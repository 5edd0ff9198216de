"""Rejections of pods and what is stored in their place: in words that name the cause and the way out."""

from __future__ import annotations

import pytest

from tests.operator.api_double import ApiDouble, Json, failure, pod_json
from tests.operator.cluster.test_executor import CORE, CREATE, EXISTS, accept_all, perform
from tests.support.jobs import make_job
from zerotrain.operator.cluster.actions import workers
from zerotrain.operator.cluster.executor import ActionRefused

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the time slice of a pass, so that a machine of any speed makes all pods in one pass."""
    monkeypatch.setattr(workers, "SHARED_S", 600.0)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("lost", ["zerotrain.dev/rank", "zerotrain.dev/job-uid", "ownerReferences"])
async def test_a_pod_that_was_stored_without_what_it_is_found_by_is_reported(lost: str, exists: bool) -> None:
    """A policy changed it at its creation, or a user did later. The watch does not show it as the job's."""
    double, found = ApiDouble(), pod_json(0, version=1, uid=make_job().uid)
    found["metadata"].pop(lost, None)
    found["metadata"]["labels"].pop(lost, None)
    accept_all(double)
    double.on(f"POST {CORE}/pods", EXISTS if exists else (201, found))
    double.on(f"GET {CORE}/pods/gpt-1-0", (200, found))
    with pytest.raises(ActionRefused, match=f"Pod gpt-1-0 has lost {lost}, by which") as caught:
        await perform(double, CREATE)
    assert caught.value.problem.lasting
    assert double.asked(f"POST {CORE}/pods") == 1


async def test_the_message_of_a_full_quota_leaves_out_the_pod_that_met_it_first() -> None:
    double = ApiDouble()
    accept_all(double)
    text = 'pods "gpt-1-0" is forbidden: exceeded quota: a, requested: pods=1, used: pods=8, limited: pods=8'
    double.on(f"POST {CORE}/pods", failure(403, "Forbidden", text))
    with pytest.raises(ActionRefused) as caught:
        await perform(double, CREATE)
    assert caught.value.problem.message == text[text.index("exceeded") :]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (failure(403, "Forbidden", "exceeded quota: pods, used 10, limited 10"), "QuotaExceeded"),
        (failure(403, "Forbidden", "denied by policy"), "ApiRefused"),
        (failure(422, "Invalid", "spec.containers: Required value"), "ApiRefused"),
    ],
)
async def test_a_refusal_is_reported_in_the_servers_words(answer: tuple[int, Json], reason: str) -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {CORE}/pods", answer)
    with pytest.raises(ActionRefused, match=str(answer[1]["message"])) as caught:
        await perform(double, CREATE)
    assert caught.value.problem.reason == reason


@pytest.mark.parametrize(
    ("violation", "way_out"),
    [
        ('must not include "IPC_LOCK" in capabilities.add', "Create the job again without it"),
        ('restricted volume type "nfs"', "Remove the named settings from the job"),
    ],
)
async def test_a_refusal_of_pod_security_names_the_way_out_and_no_pod(violation: str, way_out: str) -> None:
    """The pod that is refused first differs from pass to pass; the message in the status must not."""
    double = ApiDouble()
    accept_all(double)
    text = f'pods "gpt-1-0" is forbidden: violates PodSecurity "baseline:latest": {violation}'
    double.on(f"POST {CORE}/pods", failure(403, "Forbidden", text))
    with pytest.raises(ActionRefused) as caught:
        await perform(double, CREATE)
    problem = caught.value.problem
    assert problem.reason == "PodSecurity"
    assert violation in problem.message
    assert way_out in problem.message
    assert "kubectl label namespace ml pod-security.kubernetes.io/enforce=privileged" in problem.message
    assert "gpt-1-0" not in problem.message


@pytest.mark.parametrize(
    ("demand", "way_out"),
    [
        ("maximum ephemeral-storage usage per Container is 10Gi, but limit is 52Gi", "lower it"),
        ("minimum ephemeral-storage usage per Container is 1Gi, but request is 0", "LimitRange"),
        (
            "ephemeral-storage max limit to request ratio per Container is 2, but no request is specified or "
            "request is 0",
            "LimitRange",
        ),
    ],
)
async def test_a_refusal_of_the_disk_names_what_can_be_changed(demand: str, way_out: str) -> None:
    """A lower limit does not help where a request is demanded, which a job cannot make."""
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {CORE}/pods", failure(403, "Forbidden", f'pods "gpt-1-0" is forbidden: {demand}'))
    with pytest.raises(ActionRefused) as caught:
        await perform(double, CREATE)
    message = caught.value.problem.message
    assert demand in message
    assert [word for word in ("lower it", "LimitRange") if word in message] == [way_out]
