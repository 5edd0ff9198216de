"""The operator reads only the class's name of a claim whose class must declare encryption."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.api_double import ApiDouble, failure, served
from tests.operator.cluster.test_executor import make_executor
from tests.support.jobs import job_json
from zerotrain.operator.reconcile import AskStorageClass

pytestmark = pytest.mark.ranks

ENCRYPTED = "zerotrain.dev/encrypted-volumes"
ASK_CLAIM = AskStorageClass(field="spec.checkpoint", claim="ckpt")


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        ((200, {"spec": {"storageClassName": "fast"}}), ("fast", "parameter encrypted: true", None)),
        ((200, {"spec": {"storageClassName": ""}}), ("", None, None)),
        ((200, {"spec": {}, "metadata": {"annotations": {ENCRYPTED: "true"}}}), ("", None, None)),
        (failure(404, "NotFound", "no claim"), ("", None, "no claim")),
        (failure(403, "Forbidden", "no right"), ("", None, "no right")),
    ],
    ids=["of a class", "made by hand", "a tenant's own word", "missing", "not to be read"],
)
async def test_the_claim_is_read_and_then_its_class(claim: tuple[int, Any], expected: Any) -> None:
    double, body = ApiDouble(), job_json({"metadata.resourceVersion": "7"})
    fast = {
        "metadata": {"name": "fast"},
        "provisioner": "ebs.csi.aws.com",
        "parameters": {"encrypted": "true"},
    }
    double.on("GET /api/v1/namespaces/ml/persistentvolumeclaims/ckpt", claim)
    double.on("GET /apis/storage.k8s.io/v1/storageclasses/fast", (200, fast))
    async with served(double) as api:
        executor = make_executor(api)
        await executor.perform(body, [ASK_CLAIM])
        (found,) = executor.job_states.of(body["metadata"]["uid"]).storage_classes.values()
    name, encryption, problem = expected
    assert (found.name, found.encryption) == (name, encryption)
    assert (problem or "") in (found.problem or "")
    assert (found.problem is None) == (problem is None)
    assert found.answers(ASK_CLAIM.field, ASK_CLAIM.claim, ASK_CLAIM.name)
