"""One headless Service per job of several workers: the job's own, by a unique name, in front of the pods that
are addressed by name.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jobs import make_job
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import MAX_JOB_NAME_LENGTH
from zerotrain.operator.resources import ResourceOptions, headless_service, service_name, worker_pods

pytestmark = pytest.mark.unit

PROGRAM = {"spec.command": ["python", "train.py"]}
names = st.from_regex(r"[a-z]([-a-z0-9]{0,49}[a-z0-9])?", fullmatch=True)


def service(job: ZeroTrainingJob) -> dict[str, Any]:
    found = headless_service(job)
    assert found is not None
    return found


def named(job: ZeroTrainingJob) -> set[str]:
    """Return the pods of the job that its Service gives names to."""
    wanted = service(job)["spec"]["selector"].items()
    pods = worker_pods(job, 3, range(job.shape.workers), ResourceOptions())
    return {pod["metadata"]["name"] for pod in pods if wanted <= pod["metadata"]["labels"].items()}


@given(name=names, uids=st.lists(st.uuids(), min_size=2, max_size=2, unique=True))
def test_the_name_is_a_dns_label_of_this_life_of_the_job_alone(name: str, uids: list[object]) -> None:
    assert len(name) <= MAX_JOB_NAME_LENGTH
    one, other = (make_job({"metadata.name": name, "metadata.uid": str(uid)}) for uid in uids)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", service_name(one))
    assert service_name(one) not in (name, service_name(other))
    assert service(one)["metadata"]["name"] == service_name(one)
    assert service(one)["metadata"]["ownerReferences"][0]["uid"] == one.uid


def test_the_trainers_names_worker_0_and_a_programs_names_all() -> None:
    assert named(make_job({"spec.workers": 3})) == {"gpt-3-0"}
    assert named(make_job({"spec.workers": 3, **PROGRAM})) == {"gpt-3-0", "gpt-3-1", "gpt-3-2"}


def test_it_never_needs_to_be_changed() -> None:
    """The program and the size of a suspended job may change; an existing Service stays as it is."""
    jobs = [make_job({"spec.workers": workers, **given}) for workers in (2, 3) for given in ({}, PROGRAM)]
    made = {service(job)["metadata"]["name"]: service(job) for job in jobs}
    assert all(made[service_name(job)] == service(job) for job in jobs)


def test_a_single_worker_has_none() -> None:
    job = make_job({"spec.workers": 1})
    (pod,) = worker_pods(job, 1, (0,), ResourceOptions())
    assert headless_service(job) is None
    assert "subdomain" not in pod["spec"]
