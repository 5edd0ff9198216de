"""Memory that the operator keeps of each job: the parts that it reads, once, and models of the latest jobs
alone.
"""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.operator.reconcile_builders import job
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.job_text import kept, read_job
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.job_state import MOST_MODELS, JobStates
from zerotrain.operator.cluster.jobs import JobCache, key_of
from zerotrain.operator.controller.job_pass import is_heavy

pytestmark = pytest.mark.unit


def sent(number: int = 0) -> Json:
    """Return a job as the API server sends it: parsed anew, with the writers' metadata."""
    body = job(resourceVersion=str(number + 1))
    body["metadata"] |= {
        "name": f"job-{number}",
        "uid": f"{number:036}",
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {"f:workers": {}}}}],
        "annotations": {
            "kubectl.kubernetes.io/last-applied-configuration": json.dumps(body["spec"]),
            "team.example/cost": "research",
        },
    }
    found: Json = json.loads(json.dumps(body))
    return found


def words(part: Any) -> Iterator[str]:
    """Yield every key and every value that is text, in order."""
    if isinstance(part, dict):
        for name, value in part.items():
            yield name
            yield from words(value)
    elif isinstance(part, list):
        for item in part:
            yield from words(item)
    elif isinstance(part, str):
        yield part


def test_a_job_is_kept_as_it_was_sent_without_what_is_never_read() -> None:
    body = sent()
    whole = copy.deepcopy(body)
    cache = JobCache()
    assert cache.put(body)
    assert body == whole, "what the watch brought is not ours to change"
    del whole["metadata"]["managedFields"]
    whole["metadata"]["annotations"] = {}
    assert cache.get(key_of(body)) == whole


LARGE: dict[str, Json] = {
    "objects": {"config": {"x": [{"a": number} for number in range(1800)]}},
    "lists": {"config": {"x": [[str(number)] for number in range(1800)]}},
    "texts": {"config": {f"x{number}": "\U0001f600" + "y" * 1000 for number in range(50)}},
    "variables": {
        "podTemplate": {"env": [{"name": f"A{number}", "value": "x" * 300} for number in range(120)]}
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_spec_takes_no_more_memory_than_its_text(name: str) -> None:
    """A thousand jobs with 22 KB of small objects each would take all of the operator's memory."""
    bodies = []
    for number in range(4):
        body = sent(number)
        body["spec"] |= LARGE[name]
        bodies.append(json.dumps(body).encode())
    cache = JobCache()
    JobCache().put(read_job(bodies[0]))  # fills the bounded table of strings that all jobs share
    tracemalloc.start()
    try:
        for text in bodies:
            cache.put(read_job(text))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 2 * sum(map(len, bodies))


@pytest.mark.parametrize("name", LARGE)
def test_a_large_spec_is_read_as_it_was_sent(name: str) -> None:
    body = sent()
    body["spec"] |= LARGE[name]
    cache = JobCache()
    cache.put(kept(body))  # a watch reduces a job before it hands it on
    held = cache.get(key_of(body)) or {}
    assert held["spec"] != body["spec"]
    assert ZeroTrainingJob.parse(held).spec == ZeroTrainingJob.parse(body).spec
    assert is_heavy(held) == is_heavy(body)


def test_half_a_surrogate_pair_stays_half_a_pair() -> None:
    body = sent()
    body["spec"]["config"] = {"x": "\ud800" + "y" * 9000}
    assert ZeroTrainingJob.parse(kept(body)).spec.config == body["spec"]["config"]


def test_fields_that_are_read_in_place_are_not_packed() -> None:
    body = sent()
    tolerations = [{"key": f"k{number}", "operator": "Exists"} for number in range(60)]
    body["spec"]["scheduling"] = {"queueName": "team", "tolerations": tolerations}
    assert kept(body)["spec"] == body["spec"]


def test_jobs_share_their_words() -> None:
    cache, first, second = JobCache(), sent(1), sent(2)
    assert not any(a is b for a, b in zip(words(first["spec"]), words(second["spec"]), strict=True))
    cache.put(first)
    cache.put(second)
    one, other = (cache.get(key_of(body)) or {} for body in (first, second))
    assert all(a is b for a, b in zip(words(one["spec"]), words(other["spec"]), strict=True))


def in_phase(number: int, phase: str, *, version: int) -> Json:
    body = sent(number)
    body["metadata"]["resourceVersion"] = str(version)
    return {**body, "status": {"phase": phase}} if phase else body


def found(cache: JobCache, *phases: str) -> list[str]:
    return sorted(key.name for key, _ in cache.in_phases(phases))


def test_jobs_are_found_by_the_phase_that_they_are_in_now() -> None:
    cache = JobCache()
    for number, phase in enumerate(("Running", "Completed", "Running", "")):
        cache.put(in_phase(number, phase, version=number + 1))
    assert found(cache, "Running") == ["job-0", "job-2"]
    assert found(cache, "Completed", "") == ["job-1", "job-3"]
    cache.put(in_phase(0, "Completed", version=10))
    cache.put(in_phase(2, "Pending", version=1))  # older than what is known
    cache.wrote(in_phase(3, "Starting", version=5))
    cache.remove(in_phase(1, "Completed", version=11))
    assert found(cache, "Running", "Starting") == ["job-2", "job-3"]
    assert found(cache, "Completed") == ["job-0"]
    assert not found(cache, "", "Pending", "Suspended")
    assert [job for _, job in cache.in_phases(["Completed"])] == [cache.get(key_of(sent(0)))]


def test_the_models_of_the_latest_jobs_alone_are_kept() -> None:
    job_states = JobStates()
    body = sent()
    for number in range(MOST_MODELS + 50):
        job_states.known(str(number)).read_spec(body)
    first = job_states.known("50")  # read again: now it is the latest
    assert first.spec is not None
    assert job_states.known("0").spec is None
    assert job_states.known("51").spec is None, "the oldest went for the one before"
    assert job_states.known("50") is first
    assert len(job_states.models) == MOST_MODELS


@pytest.mark.parametrize("end", ["forget", "prune"])
def test_nothing_is_kept_of_a_job_that_is_gone(end: str) -> None:
    job_states = JobStates()
    job_states.known("gone")
    if end == "forget":
        job_states.forget("gone")
    else:
        job_states.prune(set())
    assert not job_states.models
