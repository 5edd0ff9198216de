"""The API server of a kubeconfig and how to log in, as files that Prometheus reads."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ruamel.yaml import YAML

SECRET_FILES = ("token", "client-key")
"""What `read_access` may leave in its folder that nobody else should have."""


class AccessError(ValueError):
    """The kubeconfig cannot be used; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Where the API server is, and Prometheus' client settings for it."""

    host: str
    """Host and port."""
    scheme: str
    settings: dict[str, Any]
    """`tls_config` and `authorization`; secrets are in files beside."""


def read_access(kubeconfig: Path, folder: Path) -> Access:
    """Read the current context; certificates and tokens are copied into `folder`, readable by the owner only.

    Raises AccessError for a way to log in that Prometheus does not have.
    """
    document: Any = YAML(typ="safe", pure=True).load(kubeconfig.read_text())
    context = _named(document, "contexts", document.get("current-context", ""))["context"]
    cluster = _named(document, "clusters", context["cluster"])["cluster"]
    user = _named(document, "users", context["user"])["user"]
    address = urlsplit(cluster["server"])
    tls: dict[str, Any] = {}
    if "insecure-skip-tls-verify" in cluster:
        tls["insecure_skip_verify"] = bool(cluster["insecure-skip-tls-verify"])
    for source, key, target in (
        (cluster, "certificate-authority", "ca_file"),
        (user, "client-certificate", "cert_file"),
        (user, "client-key", "key_file"),
    ):
        if (data := _data(source, key, kubeconfig)) is not None:
            tls[target] = str(_write(folder / key, data))
    settings: dict[str, Any] = {"tls_config": tls}
    if token := user.get("token"):
        settings["authorization"] = {"credentials_file": str(_write(folder / "token", token.encode()))}
    elif "cert_file" not in tls:
        raise AccessError(
            f"{kubeconfig}: user {context['user']} logs in with {', '.join(sorted(user)) or 'nothing'}, "
            "which Prometheus cannot do; give one with a token or a client certificate, or scrape inside "
            "the cluster with the chart's PodMonitor"
        )
    port = address.port or (443 if address.scheme == "https" else 80)
    return Access(host=f"{address.hostname}:{port}", scheme=address.scheme, settings=settings)


def _named(document: Any, group: str, name: str) -> Any:
    for item in document.get(group) or ():
        if item.get("name") == name:
            return item
    raise AccessError(f"the kubeconfig has no entry {name!r} under {group}; check current-context")


def _data(source: Any, key: str, kubeconfig: Path) -> bytes | None:
    """A credential that stands in the file itself, or in a file that it names."""
    if inline := source.get(f"{key}-data"):
        return base64.b64decode(inline)
    if path := source.get(key):
        return Path(kubeconfig.parent / str(path)).read_bytes()
    return None


def _write(path: Path, data: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(data)
    return path
