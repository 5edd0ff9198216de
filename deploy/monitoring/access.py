"""Address and credentials of a kubeconfig's API server, as files that Prometheus reads."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ruamel.yaml import YAML

SECRET_FILES = ("token", "client-key")
"""Names of the secret files that `read_access` may write into its folder."""


class AccessError(ValueError):
    """The kubeconfig cannot be used; the message gives the reason and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Address of the API server, and Prometheus' client settings for it."""

    host: str
    """Host and port."""
    scheme: str
    settings: dict[str, Any]
    """The keys `tls_config` and `authorization`; secrets are in separate files."""


def read_access(kubeconfig: Path, folder: Path) -> Access:
    """Read the current context of a kubeconfig.

    Certificates and tokens are copied into `folder`, readable only by the owner. Raises AccessError for a
    login method that Prometheus does not support.
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
    """Return a credential that is in the kubeconfig itself, or in a file that it names."""
    if inline := source.get(f"{key}-data"):
        return base64.b64decode(inline)
    if path := source.get(key):
        return Path(kubeconfig.parent / str(path)).read_bytes()
    return None


def _write(path: Path, data: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(data)
    return path
