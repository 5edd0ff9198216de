"""A registry as plain JSON values and back: how a rank's metrics reach its launcher without pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Exemplar, Sample

MAX_FAMILIES = 1000
MAX_SAMPLES = 20_000


def snapshot(registry: CollectorRegistry) -> list[dict[str, Any]]:
    """Every family of `registry` with its samples: [{name, help, type, unit, samples: [[...], ...]}]."""
    return [
        {
            "name": family.name,
            "help": family.documentation,
            "type": family.type,
            "unit": family.unit,
            # The text format would show creation times as families of their own; nothing of ours reads them.
            "samples": [_pack(sample) for sample in family.samples if not sample.name.endswith("_created")],
        }
        for family in registry.collect()
    ]


def restore(families: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """The families again. Raises ValueError when the data is no snapshot or exceeds its bounds."""
    try:
        if len(families) > MAX_FAMILIES or sum(len(family["samples"]) for family in families) > MAX_SAMPLES:
            raise ValueError(f"snapshot exceeds {MAX_FAMILIES} families or {MAX_SAMPLES} samples")
        return [_restore_family(family) for family in families]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a metrics snapshot: {error!r}") from error


def _restore_family(family: Mapping[str, Any]) -> Metric:
    name, text = family["name"], family["help"]
    # prometheus_client accepts any UTF-8 name; one that older scrapers refuse spoils the whole exposition.
    if not isinstance(text, str) or not _is_identifier(name):
        raise ValueError(f"family {name!r} must have an ASCII identifier as name and a text as help")
    metric = Metric(name, text, family["type"], family["unit"])
    metric.samples = [_unpack(sample, name) for sample in family["samples"]]
    return metric


def _pack(sample: Sample) -> list[Any]:
    exemplar = sample.exemplar
    packed = None if exemplar is None else [exemplar.labels, exemplar.value, exemplar.timestamp]
    return [sample.name, sample.labels, sample.value, packed]


def _unpack(packed: Sequence[Any], family: str) -> Sample:
    name, labels, value, exemplar = packed
    if not _is_identifier(name) or not name.startswith(family):
        raise ValueError(f"sample {name!r} does not belong to family {family!r}")
    if not _are_labels(labels.items()):
        raise ValueError(f"labels of {name} must be texts under identifiers; got {labels!r}")
    restored = None if exemplar is None else Exemplar(exemplar[0], float(exemplar[1]), exemplar[2])
    return Sample(name, dict(labels), float(value), None, restored)


def _are_labels(items: Iterable[tuple[Any, Any]]) -> bool:
    return all(_is_identifier(key) and isinstance(value, str) for key, value in items)


def _is_identifier(name: object) -> bool:
    return isinstance(name, str) and name.isascii() and name.isidentifier()
