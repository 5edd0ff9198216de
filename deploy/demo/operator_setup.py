"""Installs the custom resource and the operator's Deployment, as a user would with kubectl."""

from __future__ import annotations

import secrets

from deploy.demo.kubectl import Kubectl, KubectlError, wait_for
from deploy.devcluster.cluster import ROOT

OPERATOR_NAMESPACE = "zerotrain-system"
KEY_SECRET = "zerotrain-operator-key"


def install(kubectl: Kubectl) -> None:
    """Custom resource, namespace, channel key, Deployment; returns when the operator is available."""
    operator = Kubectl(kubectl.cluster, OPERATOR_NAMESPACE)
    kubectl.run("apply", "--server-side", "-f", str(ROOT / "crds"))
    kubectl.run("wait", "--for=condition=Established", "crd/zerotrainingjobs.zerotrain.dev", "--timeout=30s")
    kubectl.run("apply", "-f", str(ROOT / "deploy" / "kustomize" / "namespace.yaml"))
    _ensure_key(operator)
    kubectl.run("apply", "-k", str(ROOT / "deploy" / "kustomize"))
    wait_for("the operator's Deployment to become available", lambda: _available(operator), seconds=120)


def _ensure_key(operator: Kubectl) -> None:
    """The key that channel tokens are derived from; made once, never printed."""
    try:
        operator.run("get", "secret", KEY_SECRET)
    except KubectlError:
        key = secrets.token_hex(32)
        manifest = (
            "apiVersion: v1\nkind: Secret\nmetadata: {name: "
            + KEY_SECRET
            + "}\nstringData: {key: "
            + key
            + "}\n"
        )
        operator.run("create", "-f", "-", stdin=manifest)


def _available(operator: Kubectl) -> bool:
    found = operator.get("deployments")
    return bool(found["items"]) and all(
        item.get("status", {}).get("availableReplicas", 0) >= 1 for item in found["items"]
    )
