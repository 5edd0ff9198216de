"""Objects that an admin may put around a tenant's namespace, one row for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.cluster.hostile.texts import BREAKLESS

Json = dict[str, Any]


def quota(hard: Json, **spec: Any) -> Json:
    return _object("v1", "ResourceQuota", {"hard": hard, **spec})


def limits(**rule: Any) -> Json:
    return _object("v1", "LimitRange", {"limits": [{"type": "Container", **rule}]})


def _object(version: str, kind: str, spec: Json) -> Json:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "hostile"}, "spec": spec}


def policy(namespace: str, group: str, resource: str, operations: list[str], message: str) -> list[Json]:
    """Return a policy that rejects such objects in this namespace with this message."""
    versions = {"apiGroups": [group], "apiVersions": ["*"], "resources": [resource]}
    spec: Json = {
        "matchConstraints": {"resourceRules": [{**versions, "operations": operations}]},
        "validations": [{"expression": "false", "message": message}],
    }
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    binding = {"policyName": "hostile", "validationActions": ["Deny"], "matchResources": here}
    version = "admissionregistration.k8s.io/v1"
    return [
        _object(version, "ValidatingAdmissionPolicy", spec),
        _object(version, "ValidatingAdmissionPolicyBinding", binding),
    ]


def dead_webhook(*namespaces: str, url: str = "https://127.0.0.1:1/", timeout_s: int = 1) -> Json:
    """Return a webhook for new pods that never answers, so that their creation is rejected."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    hook = {
        "name": "hostile.example.com",
        "clientConfig": {"url": url},
        "rules": [rule],
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": timeout_s,
        "namespaceSelector": {
            "matchExpressions": [
                {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(namespaces)}
            ]
        },
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    return {**kind, "metadata": {"name": "hostile"}, "webhooks": [hook]}


def surroundings(namespace: str) -> Mapping[str, list[Json]]:
    """Return the objects by name."""
    classes = {"scopeName": "PriorityClass", "operator": "DoesNotExist"}
    return {
        "quota-zero": [quota({"pods": "0"})],
        "quota-no-gpu": [quota({"requests.nvidia.com/gpu": "0"})],
        "quota-few": [quota({"pods": "3"})],
        "quota-no-objects": [quota({"count/configmaps": "0", "count/secrets": "0", "count/services": "0"})],
        "quota-limits": [
            quota({"limits.cpu": "1m", "limits.memory": "1Mi", "limits.ephemeral-storage": "1"})
        ],
        "quota-of-class": [quota({"pods": "0"}, scopeSelector={"matchExpressions": [classes]})],
        "limits-tiny": [limits(max={"cpu": "1m", "memory": "1Mi"})],
        "limits-huge": [limits(min={"cpu": "1000", "memory": "100Ti"})],
        "policy-of-pods": policy(namespace, "", "pods", ["CREATE"], f"no {BREAKLESS}"),
        "policy-of-secrets": policy(namespace, "", "secrets", ["CREATE"], f"no {BREAKLESS}"),
        "policy-of-deletion": policy(namespace, "", "pods", ["DELETE"], f"no {BREAKLESS}"),
        "policy-of-status": policy(
            namespace, "zerotrain.dev", "zerotrainingjobs/status", ["UPDATE"], f"no {BREAKLESS}"
        ),
        "webhook-dead": [dead_webhook(namespace)],
    }
