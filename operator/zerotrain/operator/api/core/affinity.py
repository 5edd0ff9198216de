"""Affinity and spreading of the worker pods, with Kubernetes' own names."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints

from zerotrain.operator.api.base import (
    ATOMIC,
    ATOMIC_MAP,
    ApiModel,
    DnsLabel,
    Int,
    QualifiedName,
    keyed_by,
    rule,
    unique_by,
)

from .meta import LabelSelector

Weight = Annotated[Int, Field(ge=1, le=100, description="Weight of the preference, 1 to 100.")]


class NodeOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class NodeRequirement(ApiModel):
    """A condition on one label (or field) of a node."""

    key: QualifiedName
    """Label that the condition is about."""

    operator: NodeOperator
    """Operator: In, NotIn, Exists, DoesNotExist, Gt or Lt."""

    values: Annotated[
        tuple[Annotated[str, StringConstraints(max_length=253)], ...],
        Field(max_length=256, json_schema_extra=ATOMIC),
    ] = ()
    """Values: for In and NotIn at least one, for Gt and Lt one number, none otherwise."""


NodeRequirements = Annotated[
    tuple[NodeRequirement, ...],
    Field(max_length=32, json_schema_extra=ATOMIC, description="Conditions that must all hold."),
]


class NodeSelectorTerm(ApiModel):
    """Nodes that meet every condition."""

    model_config = ConfigDict(json_schema_extra=ATOMIC_MAP)

    match_expressions: NodeRequirements = ()
    match_fields: NodeRequirements = ()


class NodeSelector(ApiModel):
    """Nodes that meet at least one term."""

    model_config = ConfigDict(json_schema_extra=ATOMIC_MAP)

    node_selector_terms: Annotated[
        tuple[NodeSelectorTerm, ...], Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)
    ]
    """Terms of which at least one must hold."""


class PreferredNode(ApiModel):
    """Preference for nodes, with its weight."""

    weight: Weight
    preference: NodeSelectorTerm


class NodeAffinity(ApiModel):
    """Rules for the nodes that the workers may or should run on."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: Annotated[
        tuple[PreferredNode, ...], Field(max_length=16, json_schema_extra=ATOMIC)
    ] = ()
    """Preferences, by weight."""


class PodAffinityTerm(ApiModel):
    """Pods that the workers are to be near to, or away from."""

    label_selector: LabelSelector | None = None
    topology_key: QualifiedName
    """Node label that defines what "near" means."""

    namespaces: Annotated[tuple[DnsLabel, ...], Field(max_length=32, json_schema_extra=ATOMIC)] = ()
    """Namespaces of those pods; the job's own unless given."""

    namespace_selector: LabelSelector | None = None


class WeightedPodAffinityTerm(ApiModel):
    """Preference about neighbouring pods, with its weight."""

    weight: Weight
    pod_affinity_term: PodAffinityTerm


PodTerms = Annotated[
    tuple[PodAffinityTerm, ...],
    Field(max_length=16, json_schema_extra=ATOMIC, description="Conditions that must all hold."),
]
WeightedPodTerms = Annotated[
    tuple[WeightedPodAffinityTerm, ...],
    Field(max_length=16, json_schema_extra=ATOMIC, description="Wishes, by weight."),
]


class PodAffinity(ApiModel):
    """Pods that the workers must or should be near to (or, as anti-affinity, away from)."""

    required_during_scheduling_ignored_during_execution: PodTerms = ()
    preferred_during_scheduling_ignored_during_execution: WeightedPodTerms = ()


class Affinity(ApiModel):
    """Rules for where the workers may run."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class WhenUnsatisfiable(StrEnum):
    DO_NOT_SCHEDULE = "DoNotSchedule"
    SCHEDULE_ANYWAY = "ScheduleAnyway"


class NodeInclusion(StrEnum):
    HONOR = "Honor"
    IGNORE = "Ignore"


class TopologySpreadConstraint(ApiModel):
    """A limit on how unevenly pods are spread over the values of a node label."""

    RULES = (
        rule(
            "!has(self.minDomains) || self.whenUnsatisfiable == 'DoNotSchedule'",
            "minDomains needs whenUnsatisfiable DoNotSchedule",
            holds=lambda self: (
                self.min_domains is None or self.when_unsatisfiable is WhenUnsatisfiable.DO_NOT_SCHEDULE
            ),
            field_path=".minDomains",
        ),
    )

    max_skew: Annotated[Int, Field(ge=1, le=2**31 - 1)]
    """Largest difference between the numbers of pods in two domains, at least 1."""

    topology_key: QualifiedName
    """Node label each of whose values is a domain."""

    when_unsatisfiable: WhenUnsatisfiable
    """Treatment of a pod that no node can take within maxSkew."""

    label_selector: LabelSelector | None = None
    """Pods that are counted; the workers of the attempt unless given."""

    min_domains: Annotated[Int, Field(ge=1, le=2**31 - 1)] | None = None
    """Number of domains below which the smallest count is taken as 0; 1 unless given."""

    node_affinity_policy: NodeInclusion | None = None
    """Whether nodes that the pod's own affinity and selector exclude are left out; Honor unless given."""

    node_taints_policy: NodeInclusion | None = None
    """Whether nodes with taints that the pod does not tolerate are left out; Ignore unless given."""


TopologySpread = Annotated[
    tuple[TopologySpreadConstraint, ...],
    Field(max_length=16, json_schema_extra=keyed_by("topologyKey", "whenUnsatisfiable")),
    unique_by("topology_key", "when_unsatisfiable"),
]
