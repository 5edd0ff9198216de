"""Configuration of this replica of the operator: reads environment variables into one frozen object."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from zerotrain.contract.channel_token import MIN_KEY_BYTES
from zerotrain.operator.cluster.api import ApiLimits
from zerotrain.operator.cluster.channel import ChannelKind
from zerotrain.operator.reconcile.observe import StartLimits
from zerotrain.operator.resources import ResourceOptions

PREFIX = "ZEROTRAIN_OPERATOR_"
LOCAL_KEY = Path("build/operator/channel.key")
"""Key file that is created on first use when the operator runs outside a cluster and no key file is named."""


class OperatorConfigError(ValueError):
    """Error about a variable or file that the operator starts from: it is missing or wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorConfig:
    """Settings that may differ between two installations."""

    namespace: str = "zerotrain-system"
    """Namespace of the operator's own Lease."""
    lease: str = "zerotrain-operator"
    identity: str = ""
    """Holder of the lease: the pod's UID, so that a restarted container takes over at once."""
    key_file: Path | None = None
    """File with the secret from which channel tokens are derived."""
    http_address: str = ""
    """Address `host:port` of /healthz and /metrics, `:port` for all addresses of IPv4 and IPv6. Nothing is
    served when empty."""
    channel: ChannelKind | None = None
    """Way in which the operator reaches workers. None selects one: by pod IP inside the cluster, through the
    API server outside."""
    namespaces: tuple[str, ...] = ()
    """Namespaces whose jobs the operator manages; empty for the whole cluster."""
    workers: int = 32
    """Number of passes that run at once, over all jobs."""
    resync_s: float = 300.0
    """Seconds after which every job gets a pass at the latest, whatever the watches bring."""
    limits: ApiLimits = field(default_factory=ApiLimits)
    starts: StartLimits = field(default_factory=StartLimits)
    resources: ResourceOptions = field(default_factory=ResourceOptions)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> OperatorConfig:
        """Read the configuration from `environ`. Raises OperatorConfigError that names the variable."""
        read = partial(_read, environ)
        defaults, limits, starts, resources = cls(), ApiLimits(), StartLimits(), ResourceOptions()
        namespace = read("NAMESPACE", str, defaults.namespace)
        return cls(
            namespace=namespace,
            lease=read("LEASE", str, defaults.lease),
            identity=read("IDENTITY", str, f"{socket.gethostname()}-{secrets.token_hex(4)}"),
            key_file=read("KEY_FILE", Path, None),
            http_address=read("HTTP_ADDRESS", str, defaults.http_address),
            channel=read("CHANNEL", ChannelKind, None),
            namespaces=read("NAMESPACES", _namespaces, ()),
            workers=read("WORKERS", int, defaults.workers),
            resync_s=read("RESYNC_SECONDS", float, defaults.resync_s),
            limits=ApiLimits(
                requests_per_second=read("REQUESTS_PER_SECOND", float, limits.requests_per_second),
                burst=read("REQUEST_BURST", int, limits.burst),
            ),
            starts=StartLimits(
                refused_creation_s=read("REFUSED_CREATION_SECONDS", _seconds, starts.refused_creation_s),
                start_deadline_s=read("START_DEADLINE_SECONDS", _seconds, starts.start_deadline_s),
                max_hold_off_s=read("MAX_HOLD_OFF_SECONDS", _seconds, starts.max_hold_off_s),
            ),
            resources=ResourceOptions(
                operator_namespace=namespace,
                monitoring_namespace=read("MONITORING_NAMESPACE", str, resources.monitoring_namespace),
                dns_namespace=read("DNS_NAMESPACE", str, resources.dns_namespace),
                dns_labels=read("DNS_LABELS", _labels, resources.dns_labels),
                dns_cidrs=read("DNS_CIDRS", _names, ()),
                extra_egress_cidrs=read("EXTRA_EGRESS_CIDRS", _names, ()),
                allowed_egress_cidrs=read("ALLOWED_EGRESS_CIDRS", _networks, ()),
                extra_http_cidrs=read("EXTRA_HTTP_CIDRS", _names, ()),
                image_pull_policy=read("IMAGE_PULL_POLICY", str, None),
                rendezvous_timeout_s=read(
                    "RENDEZVOUS_TIMEOUT_SECONDS", float, resources.rendezvous_timeout_s
                ),
            ),
        )


def operator_key(config: OperatorConfig, *, in_cluster: bool) -> bytes:
    """Return the bytes of the channel key. Outside a cluster a missing file is created, readable by its owner
    alone.

    Raises OperatorConfigError.
    """
    path = config.key_file
    if path is None:
        if in_cluster:
            raise OperatorConfigError(
                f"{PREFIX}KEY_FILE must name the mounted Secret's file; see deploy/kustomize"
            )
        path = _local_key()
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise OperatorConfigError(f"{PREFIX}KEY_FILE={path} cannot be read: {error}") from error
    if len(key) < MIN_KEY_BYTES:
        raise OperatorConfigError(
            f"{PREFIX}KEY_FILE={path} holds {len(key)} bytes, at least {MIN_KEY_BYTES} are needed; "
            "create one with `openssl rand -hex 32`"
        )
    return key


def _local_key() -> Path:
    LOCAL_KEY.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Exclusive: if two operators start together, one creates the key and both use it.
        descriptor = os.open(LOCAL_KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return LOCAL_KEY
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(MIN_KEY_BYTES))
    return LOCAL_KEY


def _read(environ: Mapping[str, str], name: str, parse: Callable[[str], Any], default: Any) -> Any:
    text = environ.get(PREFIX + name, "")
    if text == "":
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise OperatorConfigError(f"{PREFIX}{name}={text!r}: {error}") from error


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 86_400:
        raise ValueError("give a number of seconds above 0, a day at most")
    return seconds


def _namespaces(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(_names(text)))
    for name in names:
        # A pattern would need permission to list all namespaces.
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            raise ValueError(f"{name!r} is not a namespace name; give comma-separated names")
    return names


def _labels(text: str) -> dict[str, str]:
    labels = {}
    for part in _names(text):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (key and equals):
            raise ValueError(f"{part!r} is not a label; give comma-separated key=value pairs")
        labels[key] = value
    return labels


def _networks(text: str) -> tuple[str, ...]:
    names = _names(text)
    for name in names:
        ip_network(name, strict=False)  # raises ValueError
    return names


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
