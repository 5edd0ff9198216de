"""Configuration of a job with spec.configFrom, found without a cluster, for `plan`, `run` and `config`.

It is in the ConfigMap that the same file contains for kubectl, or in a JSON file that is named beside it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotrain.client.jobfile import ConfigPlace, JobFile, dotted
from zerotrain.client.yaml_document import Document, FieldPath
from zerotrain.contract.config import ConfigError, load
from zerotrain.contract.config.reader import loads
from zerotrain.operator.api.workload import ConfigKey

REFERENCE: FieldPath = ("spec", "configFrom", "configMapKeyRef")


class ConfigSourceError(ValueError):
    """Error for a configuration that cannot be read; `next_step` says what to do about it."""

    def __init__(self, message: str, *, next_step: str) -> None:
        super().__init__(message)
        self.next_step = next_step


class ConfigMissingError(ConfigSourceError):
    """Error for a ConfigMap that is not in the job's file while no other file was named."""


def inlined(file: JobFile, given: Path | None = None) -> JobFile:
    """Return the job with its configuration in spec.config, wherever it was.

    `given`: the JSON file that the ConfigMap is made of (`--config`). It must equal a configuration that is
    in the job's file. Raises ConfigSourceError.
    """
    reference = file.job.spec.config_from
    if reference is None:
        if given is not None:
            _compare(file, "spec.config", file.job.spec.config or {}, given)
        return file
    key = reference.config_map_key_ref
    held = _config_map(file, key)
    if held is not None:
        place, values = _held(file, key, held)
        if given is not None:
            _compare(file, place.name, values, given)
    elif given is not None:
        place = ConfigPlace(name=f"--config {given}", line=file.document.line_of(REFERENCE))
        values = _read(given)
    else:
        raise _missing(file, key)
    spec = file.job.spec.model_copy(update={"config": values, "config_from": None})
    return replace(file, job=file.job.model_copy(update={"spec": spec}), config_place=place)


def _config_map(file: JobFile, key: ConfigKey) -> Document | None:
    """Return the ConfigMap that kubectl would apply. An object without a namespace goes to the one that
    kubectl is given, so it may be the job's. Among several, the one in the job's namespace is taken."""
    own = _namespace(file.document)
    found = [item for item in _config_maps(file) if _metadata(item).get("name") == key.name]
    same = [item for item in found if _namespace(item) == own]
    possible = same or [item for item in found if own is None or _namespace(item) is None]
    places = sorted({_namespace(item) or "" for item in possible})
    if len(places) > 1:
        raise ConfigSourceError(
            f"{file.source}: ConfigMap {key.name} exists in namespaces {', '.join(places)}, and the job's "
            "metadata.namespace does not select one of them",
            next_step="write metadata.namespace into the job",
        )
    # If two have the same name, kubectl applies the later one last.
    return possible[-1] if possible else None


def _config_maps(file: JobFile) -> Iterator[Document]:
    for item in file.others:
        value = item.value
        if isinstance(value, Mapping) and (value.get("apiVersion"), value.get("kind")) == ("v1", "ConfigMap"):
            yield item


def _metadata(document: Document) -> Mapping[str, Any]:
    found = document.value.get("metadata")
    return found if isinstance(found, Mapping) else {}


def _namespace(document: Document) -> str | None:
    return _metadata(document).get("namespace") or None


def _held(file: JobFile, key: ConfigKey, document: Document) -> tuple[ConfigPlace, dict[str, Any]]:
    field, text = _text(file, key, document)
    place = ConfigPlace(name=f"ConfigMap {key.name}, key {key.key}", line=document.line_of((field, key.key)))
    try:
        return place, loads(text, origin=place.name)
    except ConfigError as error:
        raise ConfigSourceError(
            f"{file.source}:{place.line}: {error}", next_step=f"correct {file.source} and run it again"
        ) from error


def _text(file: JobFile, key: ConfigKey, document: Document) -> tuple[str, str]:
    """Return the field that holds the key, and the text that a worker would find in the file."""
    parts: dict[str, Mapping[str, Any]] = {}
    for field in ("data", "binaryData"):
        found = document.value.get(field)
        parts[field] = found if isinstance(found, Mapping) else {}
    for field, part in parts.items():
        if key.key not in part:
            continue
        value, where = part[key.key], f"{file.source}:{document.line_of((field, key.key))}: {field}.{key.key}"
        if not isinstance(value, str):
            raise ConfigSourceError(
                f"{where}: must be a text; got {_kind(value)}", next_step=f"write it as a block: {key.key}: |"
            )
        return field, value if field == "data" else _decoded(value, where)
    names = ", ".join(name for part in parts.values() for name in part)
    raise ConfigSourceError(
        f"{file.source}:{file.document.line_of((*REFERENCE, 'key'))}: {dotted((*REFERENCE, 'key'))}: must be "
        f"a key of ConfigMap {key.name}, which has {names or 'none'}; got {key.key!r}",
        next_step=f"name one of its keys, or add {key.key} to its data",
    )


def _decoded(value: str, where: str) -> str:
    try:
        return base64.b64decode("".join(value.split()), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ConfigSourceError(
            f"{where}: must be UTF-8 text in base64 ({error}); got {value[:40]!r}",
            next_step="put the JSON under data, as it is",
        ) from error


def _kind(value: object) -> str:
    return {dict: "a mapping", list: "a list", type(None): "nothing"}.get(type(value), repr(value))


def _missing(file: JobFile, key: ConfigKey) -> ConfigMissingError:
    others = [f"{_namespace(item) or '-'}/{_metadata(item).get('name')}" for item in _config_maps(file)]
    has = f" (it has {', '.join(others[:5])}, namespace/name)" if others else ""
    namespace = _namespace(file.document)
    which = key.name if namespace is None else f"{namespace}/{key.name}"
    return ConfigMissingError(
        f"{file.source}:{file.document.line_of(REFERENCE)}: spec.configFrom: the configuration is in "
        f"ConfigMap {which}, which is not in this file{has}; it is not read from a cluster",
        next_step=f"give the JSON that its key {key.key} holds with --config FILE",
    )


def _read(given: Path) -> dict[str, Any]:
    try:
        return dict(load(given).values)
    except ConfigError as error:
        raise ConfigSourceError(
            f"--config {str(error).removeprefix('config: ')}",
            next_step="name the JSON file that the ConfigMap is made of",
        ) from error


def _compare(file: JobFile, place: str, values: Mapping[str, Any], given: Path) -> None:
    """Check that both configurations are equal: which of them the job should run must not be guessed. Raises
    ConfigSourceError."""
    other = _read(given)
    key = next((key for key in {**values, **other} if values.get(key, ...) != other.get(key, ...)), None)
    if key is not None:
        raise ConfigSourceError(
            f"{file.source}: {place} and --config {given} differ in {key!r}, and a job has one configuration",
            next_step=f"leave out --config, or change {file.source}",
        )
