"""Installation of the custom resource and the operator's Deployment, as a user would do it with kubectl."""

from __future__ import annotations

import secrets

from deploy.demo.kubectl import Kubectl, KubectlError, wait_for
from deploy.devcluster.cluster import ROOT

MANIFESTS = ROOT / "deploy" / "kustomize"
OPERATOR_NAMESPACE = "zerotrain-system"
KEY_SECRET = "zerotrain-operator-key"


def install(kubectl: Kubectl) -> None:
    """Install custom resource, namespace, channel key and Deployment, and wait for the operator."""
    operator = Kubectl(kubectl.cluster, OPERATOR_NAMESPACE)
    operator.run("apply", "-f", str(MANIFESTS / "namespace.yaml"))
    _ensure_key(operator)
    operator.run("apply", "-k", str(MANIFESTS))
    wait_for("the custom resource to be served", lambda: _established(operator), seconds=30)
    wait_for("the operator's Deployment to become available", lambda: _available(operator), seconds=120)


def _ensure_key(operator: Kubectl) -> None:
    """Create the key that channel tokens are derived from, unless it exists. It is never printed."""
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


def _established(operator: Kubectl) -> bool:
    # `kubectl wait` gives up on a CRD that has no conditions at all yet.
    found = operator.get("crd", "zerotrainingjobs.zerotrain.dev")
    conditions = found.get("status", {}).get("conditions") or ()
    return any(item["type"] == "Established" and item["status"] == "True" for item in conditions)


def _available(operator: Kubectl) -> bool:
    found = operator.get("deployments")
    return bool(found["items"]) and all(
        item.get("status", {}).get("availableReplicas", 0) >= 1 for item in found["items"]
    )
