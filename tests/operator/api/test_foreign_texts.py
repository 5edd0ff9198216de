"""Texts of a tenant, of its program or of another component never reach status, events or metrics unescaped.

Every text enters as it does in a cluster: as the JSON of an object, as the answer of a worker or of the API
server. Its reader must have made it safe (`raw_texts` of the views), and nothing that the operator writes may
be raw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from tests.operator.reconcile_builders import NOW, UID, ago, ended, job, ready, running, seen, stamp, status
from tests.support.dirt import always_dirty, raw_in, raw_texts, texts_in
from zerotrain.contract.config import ConfigError, load, resolve
from zerotrain.contract.progress import Progress, RankEnd, RejectedCheckpoint, Termination
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.api import ZeroTrainingJob, ZeroTrainingJobSpec
from zerotrain.operator.cluster.actions.diagnostics import last_lines
from zerotrain.operator.cluster.actions.rejections import ActionRefused, name_taken, rejection_of
from zerotrain.operator.cluster.channel import ChannelError
from zerotrain.operator.cluster.errors import Forbidden, error_of
from zerotrain.operator.cluster.events import event_body
from zerotrain.operator.cluster.job_metrics import values_of
from zerotrain.operator.cluster.jobs import status_body
from zerotrain.operator.cluster.nodes import node_view
from zerotrain.operator.cluster.workload_status import Flavor, queue_view
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import (
    Event,
    LogView,
    Observed,
    Plan,
    PodView,
    Problem,
    StorageClassView,
    YieldState,
    pod_view,
    reconcile,
)
from zerotrain.operator.reconcile.attempt_checks import refusal_of, unreadable
from zerotrain.operator.resources.diagnostics import read_stacks, stacks_config_map
from zerotrain.operator.resources.storage_class import declared_encryption

pytestmark = pytest.mark.unit

Json = dict[str, Any]
World = Callable[[str], tuple[Json, Observed]]
"""Function that makes a job and its observation, with one text in every place that another component
writes.
"""


def pod(index: int, state: Json, *, phase: str, before: Json | None = None, **more: Any) -> PodView:
    labels = {"zerotrain.dev/job": "gpt", "zerotrain.dev/attempt": "1", "zerotrain.dev/rank": str(index)}
    found = pod_view(
        {
            "metadata": {"name": f"gpt-1-{index}", "uid": f"pod-1-{index}", "labels": labels},
            "spec": {"nodeName": f"node-{index}", "initContainers": [{"name": "fetch"}]},
            "status": {
                "phase": phase,
                "podIP": "10.0.0.1",
                "containerStatuses": [{"name": "worker", "state": state}],
                "initContainerStatuses": [before] if before else [],
                **more,
            },
        },
        seen_at=ago(60),
    )
    assert found is not None
    return found


def terminated(message: str, *, code: int = 1, reason: str = "Error") -> Json:
    end = {"exitCode": code, "reason": reason, "message": message, "finishedAt": stamp(ago(60))}
    return {"terminated": end}


def a_plain_last_word(text: str) -> tuple[Json, Observed]:
    last = pod(0, terminated(text, reason=text), phase="Failed")
    return job(status=status("Running")), seen(last, ready(1), log=LogView())


def a_message_of_the_launcher(text: str) -> tuple[Json, Observed]:
    message = {
        "attempt": 1, "code": 1, "rank": 0, "exception": f"ValueError: {text}", "last_line": text,
        "checkpoint": {"step": 3, "path": f"/ckpt/{text}", "time": 5.0},
        "also_failed": [{"rank": 1, "code": 3, "reason": text}],
    }  # fmt: skip
    last = pod(0, terminated(json.dumps(message)), phase="Failed")
    return job(spec={"ranksPerWorker": 1}, status=status("Running")), seen(last, ready(1))


def words_of_the_kubelet(text: str) -> tuple[Json, Observed]:
    evicted = pod(0, {}, phase="Failed", reason=text, message=text)
    lost = {"type": "DisruptionTarget", "status": "True", "reason": text, "message": text}
    killed = pod(1, terminated(text, code=137, reason=text), phase="Failed", conditions=[lost])
    return job(status=status("Running")), seen(evicted, killed)


def a_failed_init_container(text: str) -> tuple[Json, Observed]:
    failed = pod(0, {}, phase="Failed", before={"name": text, "state": terminated(text, code=3, reason=text)})
    return job(status=status("Starting")), seen(failed, running(1))


def a_container_that_waits(text: str) -> tuple[Json, Observed]:
    waits = {"waiting": {"reason": text, "message": text}}
    own, before = (
        pod(0, waits, phase="Pending"),
        pod(1, {}, phase="Pending", before={"name": text, "state": waits}),
    )
    return job(status=status("Pending")), seen(own, before)


def words_of_the_scheduler(text: str) -> tuple[Json, Observed]:
    refused = {"type": "PodScheduled", "status": "False", "reason": text, "message": text}
    pods = [pod(index, {}, phase="Pending", conditions=[refused]) for index in (0, 1)]
    return job(status=status("Pending")), seen(*pods)


def a_report_of_a_worker(text: str) -> tuple[Json, Observed]:
    record = {
        "rank": 0, "attempt": 1, "phase": "step", "step": 5, "resumed_from": 2,
        "checkpoint": {"step": 3, "path": f"/ckpt/{text}", "time": 5.0},
        "rejected_checkpoints": [{"path": text, "reason": text}],
    }  # fmt: skip
    known = {"job": "gpt", "job_uid": UID, "attempt": 1, "node_rank": 0, "world_size": 2, "ranks": [record]}
    report = WorkerReport.from_json(json.dumps(known))
    return job(status=status("Running")), seen(ready(0), ready(1), progress=report.ranks[0])


def keys_of_the_configuration(text: str) -> tuple[Json, Observed]:
    return job(spec={"config": {text: text, "zero_optimization": {"stage": 3, text: {text: 1}}}}), seen()


def a_value_of_the_configuration(text: str) -> tuple[Json, Observed]:
    return job(spec={"config": {"zero_optimization": {"stage": text}}}), seen()


def a_spec_that_cannot_be_read(text: str) -> tuple[Json, Observed]:
    return job(spec={text: text, "image": [text], "scheduling": {text: 1}}), seen()


def paths_of_the_spec(text: str) -> tuple[Json, Observed]:
    """Put the text into the paths of the spec, whose patterns allow any character but a colon and NUL."""
    # A lone surrogate is no text that the API server stores.
    text = text.translate({ord(":"): None, 0: None, **dict.fromkeys(range(0xD800, 0xE000))})
    template = {"volumeMounts": [{"name": "data", "mountPath": f"/dev/{text}x"}]}
    spill = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": f"/elsewhere/{text}x"}}
    volume = {"size": "1Gi", "mountPath": f"/spill/{text}x"}
    return job(spec={"podTemplate": template, "config": {"zero_optimization": spill}, "nvme": volume}), seen()


def workload(text: str, *kinds: str, **status_: Any) -> Json:
    conditions = [{"type": kind, "status": "True", "reason": text, "message": text} for kind in kinds]
    waits = {"type": "QuotaReserved", "status": "False", "reason": text, "message": text}
    return {
        "metadata": {"name": "w", "annotations": {"zerotrain.dev/excluded-nodes": f"{text},b"}},
        "spec": {"podSets": [{"count": 2}], "queueName": text, "priorityClassName": text},
        "status": {"conditions": [waits, *conditions], **status_},
    }


QUEUED = {"queueName": "team"}


def words_of_a_queue(text: str) -> tuple[Json, Observed]:
    made = job(spec=QUEUED, status=status("Queued"))
    return made, seen(queue=queue_view(workload(text), []), follows_queues=True)


def an_eviction_by_a_queue(text: str) -> tuple[Json, Observed]:
    view = queue_view(workload(text, "Evicted", "Admitted"), [Flavor(problem=None)])
    return job(spec=QUEUED, status=status("Running")), seen(
        ready(0), ready(1), queue=view, follows_queues=True
    )


def annotations_of_an_admission_check(text: str) -> tuple[Json, Observed]:
    update = {"annotations": {"note": text}}
    admitted = workload(text, "Admitted", admissionChecks=[{"podSetUpdates": [update]}])
    admitted["status"]["conditions"][0]["status"] = "True"
    admitted["metadata"]["annotations"] = {}
    admitted["spec"] = {"podSets": [{"count": 2}], "queueName": "team"}
    return job(spec=QUEUED, status=status("Queued")), seen(
        queue=queue_view(admitted, []), follows_queues=True
    )


def nodes_that_failed(text: str) -> tuple[Json, Observed]:
    view = queue_view(workload(text, unhealthyNodes=[{"name": text}]), [])
    return job(spec=QUEUED, status=status("Queued")), seen(queue=view, follows_queues=True)


def problem_of(text: str, code: int) -> Problem:
    """Return the problem that the executor makes of an answer of the API server, which quotes the request."""
    error = error_of("POST /pods", code, json.dumps({"reason": text, "message": text}).encode())
    return ActionRefused(Reason.API_REFUSED, str(error)).problem


def answers_of_the_api_server(text: str) -> tuple[Json, Observed]:
    return job(status=status("Pending", podsCreated=False)), seen(problem=problem_of(text, 422))


def an_answer_of_a_proxy(text: str) -> tuple[Json, Observed]:
    error = error_of("POST /pods", 403, text.encode(errors="replace"))
    return job(status=status("Pending")), seen(problem=ActionRefused(Reason.API_REFUSED, str(error)).problem)


def quota_and_pod_security(text: str) -> tuple[Json, Observed]:
    message = json.dumps({"reason": "Forbidden", "message": f'violates PodSecurity "{text}": {text}'})
    error = error_of("POST /pods", 403, message.encode())
    assert isinstance(error, Forbidden)
    item = {"kind": "Pod", "metadata": {"name": "gpt-1-0", "namespace": "ml"}}
    return job(status=status("Pending", podsCreated=False)), seen(problem=rejection_of(error, item).problem)


def an_object_of_another_owner(text: str) -> tuple[Json, Observed]:
    taken = name_taken({"kind": text, "metadata": {"name": "gpt"}}).problem
    return job(status=status("Pending", podsCreated=False)), seen(problem=taken)


def what_a_worker_answers_to_a_request(text: str) -> tuple[Json, Observed]:
    asked = status("Suspending", checkpoint={"requestedAt": stamp(ago(300))})
    asked["yieldRequest"] = {"reason": "Suspend", "requestedAt": stamp(ago(300))}
    state = YieldState(attempt=1, error=str(ChannelError(text, final=True)), refused=True)
    return job(spec={"suspend": True}, status=asked), seen(ready(0), ready(1), yielding=state)


def a_log_that_was_not_kept(text: str) -> tuple[Json, Observed]:
    failure = {
        "attempt": 1,
        "time": stamp(ago(3)),
        "pod": "gpt-1-0",
        "log": "attempt-1.log",
        "reason": "RankFailed",
    }
    log = LogView(attempt=1, error=str(error_of("POST", 422, text.encode(errors="replace"))))
    return job(status=status("Restarting", failures=[failure])), seen(ended(0, 1), ended(1, 1), log=log)


def a_storage_class(text: str) -> tuple[Json, Observed]:
    found = {
        "metadata": {"name": "fast"},
        "provisioner": "pd.csi.storage.gke.io",
        "parameters": {"disk-encryption-kms-key": text},
    }
    view = StorageClassView(name="fast", at=ago(1), encryption=declared_encryption(found), problem=None)
    return job(), seen(storage_classes=(view,))


def taints_of_a_node(text: str) -> tuple[Json, Observed]:
    taint = {"key": text, "value": text, "effect": "NoExecute"}
    node = node_view({"metadata": {"name": "node-0"}, "spec": {"taints": [taint], "unschedulable": True}})
    return job(status=status("Running")), seen(ready(0), ready(1), nodes={"node-0": node})


WORLDS: tuple[World, ...] = (
    a_plain_last_word,
    a_message_of_the_launcher,
    words_of_the_kubelet,
    a_failed_init_container,
    a_container_that_waits,
    words_of_the_scheduler,
    a_report_of_a_worker,
    keys_of_the_configuration,
    a_value_of_the_configuration,
    a_spec_that_cannot_be_read,
    paths_of_the_spec,
    words_of_a_queue,
    an_eviction_by_a_queue,
    annotations_of_an_admission_check,
    nodes_that_failed,
    answers_of_the_api_server,
    an_answer_of_a_proxy,
    quota_and_pod_security,
    an_object_of_another_owner,
    what_a_worker_answers_to_a_request,
    a_log_that_was_not_kept,
    a_storage_class,
    taints_of_a_node,
)


def written(made: Json, plan: Plan) -> Iterator[Any]:
    """Yield all that the operator would write about the job, as the API server gets it."""
    for event in plan.events:
        yield event_body(made, event, instance="a", now=NOW)
    if plan.status is not None:
        body = status_body(plan.status)
        yield body
        stored = {**made, "status": body}
        yield [labels for _, labels, _ in values_of(stored)]


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.__name__)
@settings(max_examples=12, deadline=None)
@given(text=always_dirty())
def test_nothing_raw_is_seen_or_written(world: World, text: str) -> None:
    made, observed = world(text)
    assert raw_texts(observed) == []
    plan = reconcile(made, observed, NOW)
    assert plan.status is not None or plan.events, "the world says nothing: the test would see nothing"
    for body in written(made, plan):
        assert raw_texts(body) == []


@pytest.mark.parametrize(
    "world",
    [
        a_plain_last_word,
        a_message_of_the_launcher,
        words_of_the_kubelet,
        words_of_the_scheduler,
        an_answer_of_a_proxy,
    ],
    ids=lambda world: world.__name__,
)
def test_a_text_of_a_megabyte_is_bounded_where_it_is_read(world: World) -> None:
    made, observed = world("\x07x" * (1 << 19))
    assert max(len(text) for _, text in texts_in(observed)) <= 2000
    for body in written(made, reconcile(made, observed, NOW)):
        assert max((len(text) for _, text in texts_in(body)), default=0) <= 1024


@settings(max_examples=50, deadline=None)
@given(text=always_dirty())
def test_logs_and_stacks_keep_their_lines_and_nothing_raw(text: str) -> None:
    for line in last_lines(f"first\n{text}\nlast\n", None).split("\n"):
        assert not raw_in(line.replace("\t", " "))
    worker = read_stacks(f"=== rank 0 (pid 1, {text})\n{text}\n", workers=1)
    stacks = stacks_config_map(ZeroTrainingJob.parse(job()), 1, {0: worker})
    for part in stacks["data"].values():
        assert not raw_in(part.replace("\t", " ").replace("\n", " "))


@settings(max_examples=50, deadline=None)
@given(text=always_dirty())
def test_a_launcher_writes_nothing_raw(text: str) -> None:
    """The launcher's termination message is shown by `describe` of the pod, its records to any client of the
    worker.
    """
    other = RankEnd(rank=1, code=3, reason=text)
    end = Termination(attempt=1, code=1, exception=text, last_line=text, also_failed=(other,))
    damaged = RejectedCheckpoint(path="/ckpt/3", reason=text)
    record = Progress(rank=0, attempt=1, rejected_checkpoints=(damaged,))
    assert raw_texts(json.loads(end.to_json())) == []
    assert raw_texts(json.loads(record.to_json())) == []


@pytest.mark.parametrize(
    "world",
    [keys_of_the_configuration, a_value_of_the_configuration, paths_of_the_spec],
    ids=lambda world: world.__name__,
)
@settings(max_examples=12, deadline=None)
@given(text=always_dirty())
def test_what_refuses_a_spec_quotes_nothing_raw(world: World, text: str) -> None:
    """Refusals are also shown outside of status and events: on the command line, in a log."""
    spec = ZeroTrainingJobSpec.model_validate(world(text)[0]["spec"])
    assert refusal_of(spec) is not None
    assert raw_texts(refusal_of(spec)) == []
    for broken in ({text: 1}, {"zero_optimization": {text: 1}}, {"zero_optimization": {"stage": text}}):
        with pytest.raises(ConfigError) as refused:
            resolve(load(broken), world_size=1)
        assert raw_texts([refused.value.path, refused.value.rule, refused.value.way_out]) == []
        assert raw_texts(str(refused.value)) == []


@settings(max_examples=12, deadline=None)
@given(text=always_dirty())
def test_what_cannot_be_read_quotes_nothing_raw(text: str) -> None:
    made, _ = a_spec_that_cannot_be_read(text)
    with pytest.raises(ValidationError) as refused:
        ZeroTrainingJobSpec.model_validate(made["spec"])
    assert raw_texts(unreadable(refused.value)) == []


@settings(max_examples=12, deadline=None)
@given(text=always_dirty())
def test_an_event_is_the_last_place_where_a_text_is_made_safe(text: str) -> None:
    event = Event(reason=text, message=text, attempt=1)
    assert raw_texts(event_body(job(), event, instance="a", now=NOW)) == []
