"""Kubeconfig and identity of the API server, by the `kubernetes` package."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.client.errors import ClientError, KubeconfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """One API server, one identity, and the default namespace of its kubeconfig."""

    configuration: Any
    """Object of type kubernetes.client.Configuration."""
    namespace: str
    context: str
    """Name of the context, for messages; `in-cluster` in a pod."""

    @property
    def url(self) -> str:
        return str(self.configuration.host).rstrip("/")


def find_server(kubeconfig: Path | str | None, context: str | None) -> Server:
    """Find the server by the given kubeconfig, else $KUBECONFIG, else the pod's service account, else
    ~/.kube/config.

    Raises KubeconfigError.
    """
    client, config = kubernetes_package()
    configuration = client.Configuration()
    configuration.retries = _retries()
    asked = str(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG")
    if not asked and context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_incluster_config(client_configuration=configuration)
        return Server(configuration=configuration, namespace=_own_namespace(), context="in-cluster")
    if asked and not any(Path(part).expanduser().is_file() for part in asked.split(os.pathsep) if part):
        raise KubeconfigError(
            f"there is no kubeconfig at {asked}", next_step="correct --kubeconfig or KUBECONFIG"
        )
    file = (
        os.pathsep.join(str(Path(part).expanduser()) for part in asked.split(os.pathsep)) if asked else None
    )
    try:
        contexts, active = config.list_kube_config_contexts(config_file=file)
        chosen = _choose(contexts, active, context)
        config.load_kube_config(config_file=file, context=chosen["name"], client_configuration=configuration)
    except ClientError:
        raise
    # The loader passes on any exception of its YAML reader, the file system and plugins.
    except Exception as error:
        raise _unusable(asked, error) from error
    namespace = (chosen.get("context") or {}).get("namespace") or "default"
    return Server(configuration=configuration, namespace=str(namespace), context=str(chosen["name"]))


def kubernetes_package() -> tuple[Any, Any]:
    """Import kubernetes.client and kubernetes.config in 0.3 s, and not in 1.6 s with 22 MiB more.

    The package imports all of itself, and its dynamic client also `kubernetes_validate` where that is
    installed, as in the development environment. The package has no switch for it. The module is hidden for
    the import alone: a program that uses the client may need it.
    """
    validator = "kubernetes_validate"
    hide = validator not in sys.modules
    if hide:
        sys.modules[validator] = None  # type: ignore[assignment]
    try:
        from kubernetes import client, config
    finally:
        if hide:
            del sys.modules[validator]
    return client, config


def _retries() -> Any:
    """Return the retry policy: once more if the connection closed during a read; requests that change
    something are sent once."""
    import urllib3

    return urllib3.Retry(total=1, connect=0, read=1, redirect=False, status=0, other=0)


def _own_namespace() -> str:
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text().strip() or "default"
    except OSError:
        return "default"


def _choose(contexts: list[Any], active: Any, wanted: str | None) -> dict[str, Any]:
    if wanted is None:
        return dict(active)
    found = next((item for item in contexts if item["name"] == wanted), None)
    if found is None:
        known = ", ".join(sorted(str(item["name"]) for item in contexts)) or "none"
        raise KubeconfigError(
            f"the kubeconfig has no context {wanted!r}; it has {known}", next_step="choose one of them"
        )
    return dict(found)


def _unusable(asked: str | None, error: Exception) -> KubeconfigError:
    place = asked or "~/.kube/config"
    message = " ".join(str(error).split()) or type(error).__name__
    if asked is None and not Path("~/.kube/config").expanduser().exists():
        return KubeconfigError(
            "there is no kubeconfig: neither KUBECONFIG nor ~/.kube/config names a cluster",
            next_step="export KUBECONFIG=..., or start a cluster here: make cluster-up",
        )
    return KubeconfigError(
        f"the kubeconfig {place} cannot be used: {message}",
        next_step="see kubectl config view, and kubectl config use-context NAME",
    )
