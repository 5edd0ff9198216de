"""A registry as plain JSON values and back: a rank's metrics reach its launcher without pickle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Exemplar, Sample

from zerotrain.contract.metrics import RANK_METRICS

MAX_FAMILIES = 1000
MAX_SAMPLES = 20_000
MAX_EXEMPLAR_CHARS = 128
"""OpenMetrics' limit; a scrape with more fails as a whole."""

_OWN = {spec.name.removesuffix("_total").removesuffix("_info"): spec.kind.value for spec in RANK_METRICS}
"""Families of the catalogue that a rank exports, with their types."""
_OF_OTHERS = ("zerotrain_", "DCGM_", "ALERTS", "scrape_")
_ENDS = {
    "counter": ("_total",),
    "gauge": ("",),
    "unknown": ("",),
    "stateset": ("",),
    "info": ("_info",),
    "summary": ("", "_count", "_sum"),
    "histogram": ("_bucket", "_count", "_sum"),
    "gaugehistogram": ("_bucket", "_gcount", "_gsum"),
}
"""Suffixes of the samples' names by type."""


def snapshot(registry: CollectorRegistry) -> list[dict[str, Any]]:
    """Return every family of `registry` with its samples: [{name, help, type, unit, samples: [[...],
    ...]}]."""
    return [
        {
            "name": family.name,
            "help": family.documentation,
            "type": family.type,
            "unit": family.unit,
            # The text format would show creation times as separate families, which nothing here reads.
            "samples": [_pack(sample) for sample in family.samples if not sample.name.endswith("_created")],
        }
        for family in registry.collect()
    ]


def restore(families: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Return the families of a snapshot, without those under names reserved for other sources. Raises
    ValueError when the data is not a snapshot or exceeds its bounds: it comes from a tenant's program."""
    try:
        if len(families) > MAX_FAMILIES or sum(len(family["samples"]) for family in families) > MAX_SAMPLES:
            raise ValueError(f"snapshot exceeds {MAX_FAMILIES} families or {MAX_SAMPLES} samples")
        return [_restore_family(family) for family in families if not _speaks_for_others(family["name"])]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a metrics snapshot: {error!r}") from error


def _restore_family(family: Mapping[str, Any]) -> Metric:
    name, text, kind, unit = family["name"], family["help"], family["type"], family["unit"]
    # prometheus_client accepts any UTF-8 name; one that older scrapers reject spoils the whole exposition.
    if not (_is_text(text) and _is_text(kind) and _is_identifier(name)):
        raise ValueError(f"family {name!r} must have an ASCII identifier as name and texts as help and type")
    # The exposition writes the unit unchanged.
    if not _is_text(unit) or (unit and not name.endswith(f"_{unit}")):
        raise ValueError(f"unit of {name} must be empty or how the name ends; got {unit!r}")
    own = _OWN.get(name)
    if own is not None and kind != own:
        raise ValueError(f"{name} is a {own}; got a {kind}")
    # A rank has one set of fixed facts. Rules multiply by it: a second one would make them fail for all jobs.
    if own == "info" and len(family["samples"]) > 1:
        raise ValueError(f"{name} must be reported once by a rank; got {len(family['samples'])} samples")
    metric = Metric(name, text, kind, unit)
    metric.samples = [_unpack(sample, metric) for sample in family["samples"]]
    return metric


def _speaks_for_others(name: object) -> bool:
    """Return whether a name belongs to the operator, the launcher, the GPU exporter or Prometheus, whose
    series rules trust."""
    if not isinstance(name, str) or name in _OWN:
        return False
    return name == "up" or name.startswith(_OF_OTHERS)


def _pack(sample: Sample) -> list[Any]:
    exemplar = sample.exemplar
    packed = None if exemplar is None else [exemplar.labels, exemplar.value, exemplar.timestamp]
    return [sample.name, sample.labels, sample.value, packed]


def _unpack(packed: Sequence[Any], family: Metric) -> Sample:
    name, labels, value, exemplar = packed
    # A common prefix is not enough: a family `z` would then hold any of our series.
    if not isinstance(name, str) or name not in {family.name + end for end in _ENDS[family.type]}:
        raise ValueError(f"sample {name!r} does not belong to the {family.type} {family.name!r}")
    if not _are_labels(labels.items()):
        raise ValueError(f"labels of {name} must be texts under identifiers; got {labels!r}")
    restored = None
    if exemplar is not None:
        if not name.endswith(("_total", "_bucket")):
            raise ValueError(f"{name} is no counter or bucket, so it has no exemplar")
        restored = _exemplar(*exemplar)
    return Sample(name, dict(labels), float(value), None, restored)


def _exemplar(labels: Mapping[str, str], value: Any, timestamp: Any) -> Exemplar:
    """Return the exemplar. Every part is checked, because the encoder writes it unchanged: a line break would
    begin a series."""
    moment = None if timestamp is None else float(timestamp)
    if not _are_labels(labels.items()) or sum(map(len, (*labels, *labels.values()))) > MAX_EXEMPLAR_CHARS:
        raise ValueError(f"an exemplar has at most {MAX_EXEMPLAR_CHARS} characters of labels; got {labels!r}")
    if moment is not None and not math.isfinite(moment):
        raise ValueError(f"an exemplar's time must be finite; got {moment}")
    return Exemplar(dict(labels), float(value), moment)


def _are_labels(items: Iterable[tuple[Any, Any]]) -> bool:
    # Prometheus reserves `__` and rejects an answer with a second `__name__`.
    return all(_is_identifier(key) and not key.startswith("__") and _is_text(value) for key, value in items)


def _is_identifier(name: object) -> bool:
    return isinstance(name, str) and name.isascii() and name.isidentifier()


def _is_text(value: object) -> bool:
    """Return whether a value is text. Half a surrogate pair is not: encoding it would fail, and with it the
    answer for all ranks."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
