"""The time to live deletes the version of the job that was checked, or nothing."""

from __future__ import annotations

import pytest

from tests.operator.api_double import ApiDouble, failure, served
from tests.operator.reconcile_builders import UID, job
from zerotrain.operator.cluster.errors import Conflict
from zerotrain.operator.cluster.jobs import JobClient

pytestmark = pytest.mark.ranks


PATH = "/apis/zerotrain.dev/v1alpha1/namespaces/ml/zerotrainingjobs/gpt"


async def test_the_deletion_names_life_and_version() -> None:
    double = ApiDouble()
    double.on(f"DELETE {PATH}", (200, {}))
    async with served(double) as api:
        await JobClient(api).delete(job(resourceVersion="7"))
    (body,) = double.bodies(f"DELETE {PATH}")
    assert body["preconditions"] == {"uid": UID, "resourceVersion": "7"}
    assert body["propagationPolicy"] == "Background"


async def test_an_edit_in_the_same_moment_keeps_the_job_for_another_look() -> None:
    double = ApiDouble()
    double.on(f"DELETE {PATH}", failure(409, "Conflict"))
    async with served(double) as api:
        with pytest.raises(Conflict):
            await JobClient(api).delete(job(resourceVersion="7"))
    assert double.asked(f"DELETE {PATH}") == 1
