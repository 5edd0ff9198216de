"""Extra containers of a worker pod (init containers and sidecars), with Kubernetes' names.

Their security context is the operator's: non-root, no privilege escalation, no capabilities, RuntimeDefault
seccomp. Only the user and the read-only root may be chosen.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from zerotrain.operator.api.base import ATOMIC, ApiModel, Argument, Bool, DnsLabel, Int, keyed_by, rule
from zerotrain.operator.api.paths import ExportedPath
from zerotrain.operator.api.quantity import AnyQuantity
from zerotrain.operator.constants import CONTAINER_NAME, RESERVED_PREFIX

from .environment import EnvFromSources, EnvVars
from .volumes import VolumeMounts

ResourceMap = Annotated[dict[str, AnyQuantity], Field(max_length=16)]
Image = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\s]+$")]


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Protocol(StrEnum):
    TCP = "TCP"
    UDP = "UDP"
    SCTP = "SCTP"


class ContainerPort(ApiModel):
    """A port that the container listens on (information only)."""

    container_port: Annotated[Int, Field(ge=1, le=65535)]
    """Port number."""

    name: (
        Annotated[
            str, StringConstraints(min_length=1, max_length=15, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
        ]
        | None
    ) = None
    """Name of the port, unique in the pod."""

    protocol: Protocol | None = None
    """Protocol; TCP unless given."""


class ContainerResources(ApiModel):
    """Requested and maximum resources of the container."""

    limits: ResourceMap | None = None
    """Maximum that the container may use, by resource."""

    requests: ResourceMap | None = None
    """Amount reserved for the container, by resource; the limits unless given."""


class ContainerUser(ApiModel):
    """Free part of the security context; the rest is fixed by the operator."""

    run_as_user: Annotated[Int, Field(ge=1, le=2**31 - 1)] | None = None
    """User id; never 0. The pod's own (65532) unless given."""

    run_as_group: Annotated[Int, Field(ge=1, le=2**31 - 1)] | None = None
    """Group id; never 0. The pod's own (65532) unless given."""

    read_only_root_filesystem: Bool | None = None
    """Whether the root file system is read-only; true unless given. Write to a volume instead."""


class Container(ApiModel):
    """An init container or a sidecar."""

    RULES = (
        rule(
            f"self.name != '{CONTAINER_NAME}' && !self.name.startsWith('{RESERVED_PREFIX}')",
            f"the name {CONTAINER_NAME} and names that start with {RESERVED_PREFIX} are reserved",
            holds=lambda self: self.name != CONTAINER_NAME and not self.name.startswith(RESERVED_PREFIX),
            field_path=".name",
        ),
    )

    name: DnsLabel
    """Name of the container, unique in the pod."""

    image: Image
    """Image of the container."""

    image_pull_policy: PullPolicy | None = None
    """Pull policy; Kubernetes' own default unless given: Always for the tag latest, IfNotPresent
    otherwise."""

    command: Annotated[tuple[Argument, ...], Field(max_length=64, json_schema_extra=ATOMIC)] = ()
    """Command instead of the image's entry point."""

    args: Annotated[tuple[Argument, ...], Field(max_length=256, json_schema_extra=ATOMIC)] = ()
    """Arguments instead of the image's."""

    working_dir: ExportedPath | None = None
    """Folder to start in; the image's unless given."""

    env: Annotated[EnvVars, Field(json_schema_extra=keyed_by("name"))] = ()
    """Environment variables."""

    env_from: Annotated[EnvFromSources, Field(json_schema_extra=ATOMIC)] = ()
    """ConfigMaps and Secrets whose keys become variables."""

    ports: Annotated[tuple[ContainerPort, ...], Field(max_length=16, json_schema_extra=ATOMIC)] = ()
    """Ports that the container listens on."""

    resources: ContainerResources | None = None
    """Requests and limits; added to the worker's own."""

    volume_mounts: VolumeMounts = ()
    """Volumes of podTemplate.volumes to mount."""

    security_context: ContainerUser | None = None
    """User of the container; everything else is fixed to Pod Security "restricted"."""
