"""Execution of actions: existing objects are adopted if they are ours, and refused with a reason if not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.operator.api_double import ApiDouble, Json, created, failure, pod_json, served
from tests.support.devcluster import Cluster
from tests.support.jobs import job_json, make_job
from tests.support.kube_json import KubeJson
from zerotrain.contract.channel_token import derive
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions import workers
from zerotrain.operator.cluster.api import Api, ApiLimits
from zerotrain.operator.cluster.channel import ChannelError, WorkerAddress
from zerotrain.operator.cluster.connection import connect
from zerotrain.operator.cluster.executor import ActionRefused, Executor, Unfinished
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.limits import Creations
from zerotrain.operator.cluster.store import PodStore
from zerotrain.operator.cluster.telemetry import Telemetry
from zerotrain.operator.reconcile import (
    Action,
    CreateWorkers,
    DeleteJob,
    DeletePods,
    DeleteWorkers,
    ForgetGroup,
    KeepShared,
    Protection,
    RequestYield,
    UnprotectWorkers,
)
from zerotrain.operator.resources import ResourceOptions, network_policy, service_name
from zerotrain.operator.resources.diagnostics import read_stacks, stacks_config_map

KEY = b"k" * 32
CORE = "/api/v1/namespaces/ml"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/ml/networkpolicies"
EXISTS = failure(409, "AlreadyExists")


@pytest.fixture(autouse=True)
def long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the time slice of a pass, so that a machine of any speed makes all pods in one pass."""
    monkeypatch.setattr(workers, "CREATION_WINDOW_S", 600.0)
    monkeypatch.setattr(workers, "SHARED_S", 600.0)


def job() -> Json:
    return job_json({"metadata.resourceVersion": "7"})


class Channel:
    """Channel that records its requests, and refuses them if told to."""

    def __init__(self, error: ChannelError | None = None) -> None:
        self.asked: list[tuple[WorkerAddress, int, str]] = []
        self._error = error

    async def report(self, worker: WorkerAddress) -> WorkerReport:
        raise ChannelError("not asked here")

    async def request_yield(self, worker: WorkerAddress, *, attempt: int, token: str) -> None:
        self.asked.append((worker, attempt, token))
        if self._error is not None:
            raise self._error

    async def stacks(self, worker: WorkerAddress, *, token: str) -> str:
        raise ChannelError("not asked here")


async def unused(body: Json) -> None:
    """Do nothing, for a board whose jobs have begun nothing."""


def make_executor(api: Api, channel: Channel | None = None) -> Executor:
    return Executor(
        api=api,
        store=PodStore(),
        job_states=JobStates(),
        channel=channel or Channel(),
        options=ResourceOptions(),
        operator_key=KEY,
        creations=Creations(10),
    )


def mine(item: Json) -> Json:
    owner = {"kind": "ZeroTrainingJob", "name": "gpt", "uid": job()["metadata"]["uid"], "controller": True}
    return {**item, "metadata": {**item.get("metadata", {}), "ownerReferences": [owner]}}


def accept_all(double: ApiDouble) -> None:
    for path in (f"{CORE}/services", f"{CORE}/configmaps", f"{CORE}/secrets", POLICIES):
        double.on(f"POST {path}", (201, {}))
    double.on(f"POST {CORE}/pods", created)


async def perform(double: ApiDouble, *actions: Action) -> None:
    async with served(double) as api:
        await make_executor(api).perform(job(), actions)


CREATE = CreateWorkers(attempt=1, indices=(0, 1))


@pytest.mark.ranks
async def test_shared_objects_come_before_the_pods() -> None:
    double = ApiDouble()
    accept_all(double)
    await perform(double, CREATE)
    posted = [path.rsplit("/", 1)[-1] for verb, path, _ in double.requests if verb == "POST"]
    assert sorted(posted[:3]) == ["networkpolicies", "secrets", "services"]
    assert posted[3:] == ["pods", "pods"]


@pytest.mark.ranks
@pytest.mark.parametrize(("attempt", "made"), [(1, [1, 1]), (2, [2, 2])])
async def test_shared_objects_are_ensured_once_an_attempt(attempt: int, made: list[int]) -> None:
    double = ApiDouble()
    accept_all(double)
    async with served(double) as api:
        executor = make_executor(api)
        await executor.perform(job(), [CREATE])
        await executor.perform(job(), [CreateWorkers(attempt=attempt, indices=(0, 1))])
    assert [double.asked(f"POST {path}") for path in (POLICIES, f"{CORE}/secrets")] == made


@pytest.mark.ranks
async def test_a_secret_is_made_again_with_pods_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SHARED_FRESH", timedelta())
    double = ApiDouble()
    accept_all(double)
    await perform(double, CREATE, CREATE)
    assert [double.asked(f"POST {path}") for path in (POLICIES, f"{CORE}/secrets")] == [1, 2]


@pytest.mark.ranks
async def test_pods_are_made_for_a_while_and_the_others_in_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "CREATION_WINDOW_S", 0.0)
    monkeypatch.setattr(workers, "SHARED_S", 0.0)
    double, all_made, body = ApiDouble(), tuple(range(10)), job()
    body["spec"] = {**body["spec"], "workers": len(all_made)}
    accept_all(double)

    def made() -> list[int]:
        labels = [body["metadata"]["labels"] for body in double.bodies(f"POST {CORE}/pods")]
        return sorted(int(label["zerotrain.dev/rank"]) for label in labels)

    async with served(double) as api:
        executor, had = make_executor(api), list[int]()
        while left := tuple(set(all_made) - set(made())):
            before = len(left)
            try:
                await executor.perform(body, [CreateWorkers(attempt=1, indices=left)])
                had.append(before)
            except Unfinished as cut:
                had.append(cut.made)
            assert len(made()) == sum(had)
            assert len(had) == 1 or had[-1] > 0, "some each time, after what they share"
    assert made() == list(all_made), "none twice"
    assert had[0] == 0
    assert len(had) > 2
    assert double.asked(f"POST {CORE}/secrets") == 1


SHARED = {
    "Service": (f"{CORE}/services", service_name(make_job())),
    "NetworkPolicy": (POLICIES, "gpt"),
    "Secret": (f"{CORE}/secrets", None),
    "PodDisruptionBudget": ("/apis/policy/v1/namespaces/ml/poddisruptionbudgets", "gpt-1"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("gone", [None, *SHARED])
async def test_deleted_objects_of_a_running_attempt_are_made_again(gone: str | None) -> None:
    double, wanted = ApiDouble(), network_policy(make_job(), ResourceOptions())["spec"]
    for kind, (path, name) in SHARED.items():
        double.on(f"POST {path}", (201, {}) if kind == gone else EXISTS)
        if name is not None:
            there = mine({"spec": wanted})
            double.on(f"GET {path}/{name}", failure(404, "NotFound") if kind == gone else (200, there))
    async with served(double) as api:
        executor = make_executor(api)
        await executor.perform(job(), [KeepShared(attempt=1, protected=2)])
        assert executor.job_states.of(job()["metadata"]["uid"]).shared_at is not None
    posted = {path for verb, path, _ in double.requests if verb == "POST"}
    assert posted == {SHARED["Secret"][0], *([SHARED[gone][0]] if gone else [])}
    assert len(double.requests) == len(SHARED) + (gone not in (None, "Secret"))


@pytest.mark.ranks
async def test_a_policy_that_was_opened_under_a_running_attempt_is_closed() -> None:
    double = ApiDouble()
    for path, name in SHARED.values():
        double.on(f"POST {path}", EXISTS)
        double.on(f"GET {path}/{name}", (200, mine({"spec": {"ingress": [{}]}})))
    double.on(f"PATCH {POLICIES}/gpt", (200, {}))
    double.on(f"POST {SHARED['Service'][0]}", (201, {}))
    await perform(double, KeepShared(attempt=1))
    assert [body["spec"]["ingress"] != [{}] for body in double.bodies(f"PATCH {POLICIES}/gpt")] == [True]


@pytest.mark.ranks
async def test_stacks_that_are_there_are_brought_up_to_date() -> None:
    double, body = ApiDouble(), job()
    double.on(f"POST {CORE}/configmaps", EXISTS)
    double.on(f"GET {CORE}/configmaps/gpt-1-stacks", (200, mine({"data": {"worker-0.txt": "old"}})))
    double.on(f"PATCH {CORE}/configmaps/gpt-1-stacks", (200, {}))
    parsed = ZeroTrainingJob.parse(body)
    async with served(double) as api:
        await make_executor(api).ensure(
            parsed, stacks_config_map(parsed, 1, {0: read_stacks("new\n", workers=1)})
        )
    (patch,) = double.bodies(f"PATCH {CORE}/configmaps/gpt-1-stacks")
    assert patch["data"]["worker-0.txt"] == "new\n"


@pytest.mark.ranks
async def test_a_policy_that_differs_is_brought_back_and_one_that_does_not_is_left() -> None:
    """The installation's networks may have changed, or a tenant may have changed the policy."""
    wanted = network_policy(make_job(), ResourceOptions())["spec"]
    opened = {
        **wanted,
        "podSelector": {"matchLabels": {**wanted["podSelector"]["matchLabels"], "no": "pod"}},
        "ingress": [{}],
    }
    for spec, patches in ((wanted, 0), (opened, 1)):
        double = ApiDouble()
        accept_all(double)
        double.on(f"POST {POLICIES}", EXISTS)
        double.on(f"GET {POLICIES}/gpt", (200, mine({"spec": spec})))
        double.on(f"PATCH {POLICIES}/gpt", (200, {}))
        await perform(double, CREATE)
        assert double.asked(f"PATCH {POLICIES}/gpt") == patches
    (patch,) = double.bodies(f"PATCH {POLICIES}/gpt")
    assert patch["spec"]["ingress"] == wanted["ingress"]
    # In a merge patch null removes a key; without it the label would stay, and the policy would select no
    # pod.
    assert patch["spec"]["podSelector"]["matchLabels"]["no"] is None


@pytest.mark.ranks
async def test_a_secret_that_exists_is_never_read() -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {CORE}/secrets", EXISTS)
    await perform(double, CREATE)
    assert not [path for verb, path, _ in double.requests if verb == "GET" and "secrets" in path]


@pytest.mark.ranks
async def test_a_pod_that_exists_is_success_if_the_job_owns_it() -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {CORE}/pods", EXISTS)
    for index in (0, 1):
        double.on(f"GET {CORE}/pods/gpt-1-{index}", (200, pod_json(index, version=1, uid=make_job().uid)))
    await perform(double, CREATE)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["services", "pods"])
async def test_a_name_that_another_owner_holds_is_refused(kind: str) -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {CORE}/{kind}", EXISTS)
    for name in (service_name(make_job()), "gpt-1-0", "gpt-1-1"):
        double.on(f"GET {CORE}/{kind}/{name}", (200, {"metadata": {"name": name}}))
    with pytest.raises(ActionRefused, match="belongs to another owner") as caught:
        await perform(double, CREATE)
    assert caught.value.problem.reason == "NameTaken"


@pytest.mark.ranks
async def test_an_attempt_is_deleted_with_one_request() -> None:
    double = ApiDouble()
    double.on(f"DELETE {CORE}/pods", (200, {}))
    await perform(double, DeleteWorkers(attempt=1, grace_s=1))
    (body,) = double.bodies(f"DELETE {CORE}/pods")
    assert body == {"propagationPolicy": "Background", "gracePeriodSeconds": 1}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ended", "left"), [(True, set()), (False, {"words-1-1", "words-1-2"})], ids=["ending", "telling"]
)
async def test_pods_that_ended_unseen_stay_while_the_others_are_deleted(
    ended: bool, left: set[str], control_plane: Cluster, namespace: str, api: KubeJson
) -> None:
    """A real API server decides which have ended, whatever the operator knew when it asked."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    labels = {"zerotrain.dev/job-uid": job()["metadata"]["uid"], "zerotrain.dev/attempt": "1"}
    for index, phase in enumerate(("Running", "Succeeded", "Failed", "Pending")):
        name = f"words-1-{index}"
        spec = {"containers": [{"name": "worker", "image": "none"}], "restartPolicy": "Never"}
        api.post(pods, {"metadata": {"name": name, "labels": labels}, "spec": spec})
        api.patch(f"{pods}/{name}/status", {"status": {"phase": phase}})
    body = {**job(), "metadata": {**job()["metadata"], "namespace": namespace}}
    async with Api(await connect(control_plane.kubeconfig), ApiLimits(), Telemetry()) as client:
        await make_executor(client).perform(body, (DeleteWorkers(attempt=1, grace_s=0, ended=ended),))
    assert {pod["metadata"]["name"] for pod in api.get(pods)["items"]} == left


@pytest.mark.ranks
async def test_a_pod_is_deleted_in_one_life_only() -> None:
    double = ApiDouble()
    double.on(f"DELETE {CORE}/pods/gpt-1-0", failure(409, "Conflict", "the UID in the precondition"))
    await perform(double, DeletePods(names_uids=(("gpt-1-0", "u"), ("gpt-1-1", "v")), grace_s=0))
    (body,) = double.bodies(f"DELETE {CORE}/pods/gpt-1-0")
    assert body["preconditions"] == {"uid": "u"}
    assert body["gracePeriodSeconds"] == 0


@pytest.mark.ranks
async def test_the_job_is_deleted_in_the_version_that_was_decided_by() -> None:
    path = "/apis/zerotrain.dev/v1alpha1/namespaces/ml/zerotrainingjobs/gpt"
    double = ApiDouble()
    double.on(f"DELETE {path}", (200, {}))
    await perform(double, DeleteJob())
    assert double.bodies(f"DELETE {path}")[0]["preconditions"] == {
        "uid": job()["metadata"]["uid"],
        "resourceVersion": "7",
    }


YIELD = RequestYield(attempt=3, pod="gpt-3-0", pod_ip="10.0.0.1")


@pytest.mark.ranks
async def test_a_yield_shows_the_attempts_token_and_is_remembered() -> None:
    channel, uid = Channel(), job()["metadata"]["uid"]
    async with served(ApiDouble()) as api:
        executor = make_executor(api, channel)
        await executor.perform(job(), [YIELD])
        state = executor.job_states.of(uid).yielding
    assert channel.asked == [
        (WorkerAddress(namespace="ml", pod="gpt-3-0", ip="10.0.0.1"), 3, derive(KEY, uid, 3))
    ]
    assert state is not None
    assert state.attempt == 3
    assert state.acked_at is not None
    assert state.acked_at <= datetime.now(UTC)


@pytest.mark.ranks
@pytest.mark.parametrize("final", [True, False])
async def test_a_rejected_yield_shows_whether_another_request_helps(final: bool) -> None:
    async with served(ApiDouble()) as api:
        executor = make_executor(api, Channel(ChannelError("no", final=final)))
        await executor.perform(job(), [YIELD])
        state = executor.job_states.of(job()["metadata"]["uid"]).yielding
    assert state is not None
    assert (state.acked_at, state.refused) == (None, final)


@pytest.mark.ranks
@pytest.mark.parametrize(("owner", "deleted"), [(True, 1), (False, 0)])
async def test_a_pod_group_is_deleted_only_where_it_is_the_jobs_own(owner: bool, deleted: int) -> None:
    path = "/apis/scheduling.volcano.sh/v1beta1/namespaces/ml/podgroups/gpt-3"
    group = {"metadata": {"name": "gpt-3", "uid": "group-uid"}}
    double = ApiDouble()
    double.on(f"GET {path}", (200, mine(group) if owner else group))
    double.on(f"DELETE {path}", (200, {}))
    async with served(double) as api:
        executor = make_executor(api)
        action = ForgetGroup(attempt=3, gang="scheduling.volcano.sh/v1beta1")
        await executor.perform(job(), [action])
        assert executor.job_states.of(job()["metadata"]["uid"]).ungrouped == 3
    assert double.asked(f"DELETE {path}") == deleted
    if deleted:
        assert double.bodies(f"DELETE {path}")[0]["preconditions"] == {"uid": "group-uid"}


BUDGET = "/apis/policy/v1/namespaces/ml/poddisruptionbudgets/gpt-3"


@pytest.mark.ranks
@pytest.mark.parametrize(("owner", "deleted"), [(True, 1), (False, 0)])
async def test_a_disruption_budget_is_deleted_only_where_it_is_the_jobs_own(
    owner: bool, deleted: int
) -> None:
    budget = {"metadata": {"name": "gpt-3", "uid": "budget-uid"}}
    double = ApiDouble()
    double.on(f"GET {BUDGET}", (200, mine(budget) if owner else budget))
    double.on(f"DELETE {BUDGET}", (200, {}))
    assert await unprotected(double)
    assert double.asked(f"DELETE {BUDGET}") == deleted
    if deleted:
        assert double.bodies(f"DELETE {BUDGET}")[0]["preconditions"] == {"uid": "budget-uid"}


@pytest.mark.ranks
@pytest.mark.parametrize("there", [False, True])
async def test_a_disruption_budget_that_went_meanwhile_is_none(there: bool) -> None:
    """The budget goes before it is read, or between reading and deletion, when another object took the
    name.
    """
    double = ApiDouble()
    if there:
        double.on(f"GET {BUDGET}", (200, mine({"metadata": {"uid": "budget-uid"}})))
        double.on(f"DELETE {BUDGET}", failure(409, "Conflict"))
    assert await unprotected(double)


async def unprotected(double: ApiDouble) -> bool:
    """Return whether the operator considers attempt 3 to be without a budget."""
    async with served(double) as api:
        executor = make_executor(api)
        await executor.perform(job(), [UnprotectWorkers(attempt=3)])
        known = executor.job_states.of(job()["metadata"]["uid"]).protection
    return known == Protection(attempt=3, exists=False)
