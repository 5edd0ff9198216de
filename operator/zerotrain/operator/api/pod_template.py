"""Additions of the user to the worker pods. All lists merge by name; the operator's own names are
rejected."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from zerotrain.contract.variables import SETTABLE, TORCH_VARIABLES, is_reserved
from zerotrain.operator.constants import RESERVED_METADATA_PREFIXES

from .base import ATOMIC, ApiModel, LabelMap, ObjectName, Rule, keyed_by, rule, unique_by
from .core.affinity import Affinity, TopologySpread
from .core.containers import Container
from .core.environment import EnvFromSources, EnvVar, EnvVars
from .core.meta import LocalReference
from .core.volumes import VolumeMounts, Volumes


def _reserved_keys(field: str) -> Rule:
    tests = " || ".join(f"key.startsWith('{prefix}')" for prefix in RESERVED_METADATA_PREFIXES)
    return rule(
        f"!has(self.{field}) || self.{field}.all(key, !({tests}))",
        f"keys that start with {' or '.join(RESERVED_METADATA_PREFIXES)} are reserved",
        holds=lambda self: (
            not any(key.startswith(RESERVED_METADATA_PREFIXES) for key in getattr(self, field) or ())
        ),
        field_path=f".{field}",
    )


_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
"""Prefix of the only annotations that Pod Security checks: other values remove a container's AppArmor
profile."""


def _keeps_apparmor(key: str, value: str) -> bool:
    return not key.startswith(_APPARMOR) or value == "runtime/default" or value.startswith("localhost/")


_TORCH_NAMES = sorted(TORCH_VARIABLES)


def _may_be_given(variable: EnvVar) -> bool:
    if variable.name in SETTABLE:
        return variable.value_from is None
    return not is_reserved(variable.name)


class PodTemplate(ApiModel):
    """Additions to the worker pods. Lists merge by name; the operator's own names are rejected."""

    RULES = (
        _reserved_keys("labels"),
        _reserved_keys("annotations"),
        rule(
            f"!has(self.annotations) || self.annotations.all(key, !key.startsWith('{_APPARMOR}') || "
            "self.annotations[key] == 'runtime/default' || self.annotations[key].startsWith('localhost/'))",
            f"the value of {_APPARMOR}* must be runtime/default or localhost/PROFILE",
            holds=lambda self: all(_keeps_apparmor(*item) for item in (self.annotations or {}).items()),
            field_path=".annotations",
        ),
        rule(
            f"!has(self.env) || self.env.all(variable, variable.name in {list(SETTABLE)} "
            "? !has(variable.valueFrom) : !variable.name.startsWith('ZEROTRAIN_') "
            f"&& !(variable.name in {_TORCH_NAMES}))",
            f"the operator sets these variables itself: ZEROTRAIN_*, {', '.join(_TORCH_NAMES)}. Free among "
            f"them, with value and without valueFrom: {', '.join(SETTABLE)}",
            holds=lambda self: all(_may_be_given(variable) for variable in self.env),
            field_path=".env",
        ),
    )

    labels: LabelMap | None = None
    """Labels of the pods."""

    annotations: (
        Annotated[dict[str, Annotated[str, Field(max_length=16384)]], Field(max_length=64)] | None
    ) = None
    """Annotations of the pods."""

    env: Annotated[EnvVars, Field(json_schema_extra=keyed_by("name"))] = ()
    """Environment variables of the ranks."""

    env_from: Annotated[EnvFromSources, Field(json_schema_extra=ATOMIC)] = ()
    """ConfigMaps and Secrets whose keys become environment variables of the ranks. A key that env may not
    hold, or only with value, has no effect."""

    volumes: Volumes = ()
    """Volumes of the pods, such as the one with the training data."""

    volume_mounts: VolumeMounts = ()
    """Mounts of those volumes in the ranks' container."""

    init_containers: Annotated[
        tuple[Container, ...], Field(max_length=16, json_schema_extra=keyed_by("name")), unique_by("name")
    ] = ()
    """Containers that run to completion, one after the other, before the ranks start."""

    sidecars: Annotated[
        tuple[Container, ...], Field(max_length=16, json_schema_extra=keyed_by("name")), unique_by("name")
    ] = ()
    """Containers that run beside the ranks and end with them."""

    affinity: Affinity | None = None
    """Rules for the nodes of the pods, beyond scheduling.nodeSelector."""

    topology_spread_constraints: TopologySpread = ()
    """Spreading of the pods over zones, racks or nodes, beyond scheduling.topologyKey."""

    image_pull_secrets: Annotated[
        tuple[LocalReference, ...],
        Field(max_length=16, json_schema_extra=keyed_by("name")),
        unique_by("name"),
    ] = ()
    """Secrets with the credentials of the image registry."""

    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, such as `nvidia` where the node's default runtime shows no GPU."""

    service_account_name: ObjectName | None = None
    """ServiceAccount of the pods; the namespace's default unless given. Its token is not mounted
    automatically."""
