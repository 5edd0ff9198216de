"""Constraints on the spreading of pods that the API server must reject or accept: a part of crd_cases."""

from __future__ import annotations

from typing import Any

SPREAD: dict[str, Any] = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
ANYWAY = {**SPREAD, "whenUnsatisfiable": "ScheduleAnyway"}

REFUSED_SPREADS: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "spread-twice",
        {"spec.podTemplate.topologySpreadConstraints": [SPREAD, {**SPREAD, "maxSkew": 2}]},
        "spec.podTemplate.topologySpreadConstraints[1]",
        "Duplicate value",
    ),
    (
        "spread-domains",
        {"spec.podTemplate.topologySpreadConstraints": [{**ANYWAY, "minDomains": 2}]},
        "spec.podTemplate.topologySpreadConstraints[0].minDomains",
        "minDomains needs whenUnsatisfiable DoNotSchedule",
    ),
]

ACCEPTED_SPREADS = [
    {**SPREAD, "minDomains": 2, "nodeAffinityPolicy": "Honor", "nodeTaintsPolicy": "Honor"},
    ANYWAY,
]
