"""YAML as the API server will receive it, with the line of every field. Used by `jobfile` alone.

Numbers and booleans follow YAML 1.2 core: `5e-6` and `5e8` are numbers. kubectl still reads a few plain words
by YAML 1.1 (`yes` is true, `017` is 15). Such a value would differ between a local run and the cluster, so it
is rejected with both readings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

FieldPath: TypeAlias = tuple[str | int, ...]

MAX_NODES = 100_000
"""Maximum of values with all aliases expanded: a few lines can stand for billions of values."""

MAX_DEPTH = 80
"""Maximum nesting of mappings and lists; a configuration alone may have 64."""

_TOO_DEEP = f"mappings and lists may nest {MAX_DEPTH} deep, aliases followed"
_TAG = "tag:yaml.org,2002:"
_OLD_BOOLEANS = re.compile(r"(y|yes|on|n|no|off)", re.IGNORECASE)
_OLD_OCTAL = re.compile(r"[-+]?0[0-9_]+")


class YamlProblem(ValueError):
    """Error for text that is no YAML, or for a value that readers interpret differently."""

    def __init__(self, message: str, *, line: int, path: FieldPath = ()) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.path = path


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document of a file."""

    value: Any
    """Value of plain dicts, lists, texts, numbers, booleans and None."""
    lines: dict[FieldPath, int]
    """Line of every field, 1-based."""

    def line_of(self, path: FieldPath) -> int:
        """Return the line of the field, or of the nearest enclosing one."""
        for length in range(len(path), -1, -1):
            if (line := self.lines.get(path[:length])) is not None:
                return line
        return 1


def read_documents(text: str) -> list[Document]:
    """Return all non-empty documents of `text`. Raises YamlProblem."""
    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = MAX_DEPTH
    try:
        nodes = [node for node in yaml.compose_all(text) if node is not None]
    except MaxDepthExceededError as error:
        raise YamlProblem(_TOO_DEEP, line=error.problem_mark.line + 1) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlProblem(
            f"not YAML: {error.problem or error.context}", line=1 if mark is None else mark.line + 1
        ) from error
    except (
        YAMLError,
        ValueError,
        OverflowError,
    ) as error:  # ValueError: an escape for no existing character
        raise YamlProblem(f"not YAML: {error}", line=1) from error
    return [_Reader().read(node) for node in nodes]


@dataclass(kw_only=True, slots=True)
class _Reader:
    lines: dict[FieldPath, int] = field(default_factory=dict)
    num_nodes: int = 0
    depth: int = 0
    """Present nesting depth, aliases included: a chain of them nests without a bracket."""

    def read(self, node: Node) -> Document:
        return Document(value=self._value(node, ()), lines=self.lines)

    def _value(self, node: Node, path: FieldPath) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        with self._inside(node, path):
            match node:
                case MappingNode():
                    return self._mapping(node, path)
                case SequenceNode():
                    return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
                case ScalarNode():
                    return _scalar(node, path)
        raise YamlProblem(f"unexpected {type(node).__name__}", line=node.start_mark.line + 1, path=path)

    @contextmanager
    def _inside(self, node: Node, path: FieldPath) -> Iterator[None]:
        """Count a node while it is read. Raises YamlProblem if there are too many nodes, or if they nest too
        deep."""
        line = node.start_mark.line + 1
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise YamlProblem(f"more than {MAX_NODES} values, aliases counted", line=line, path=path)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise YamlProblem(_TOO_DEEP, line=line, path=path)
        yield
        self.depth -= 1

    def _mapping(self, node: MappingNode, path: FieldPath) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == f"{_TAG}merge":
                for parent in self._parents(value_node, path):
                    merged = {**parent, **merged}
                continue
            key = _key(key_node, path)
            if key in own:
                raise YamlProblem("is given twice", line=line, path=(*path, key))
            self.lines[(*path, key)] = line
            own[key] = self._value(value_node, (*path, key))
        return {**merged, **own}

    def _parents(self, node: Node, path: FieldPath) -> Iterator[dict[str, Any]]:
        """Iterate over the mappings that `<<` names; the first one wins."""
        nodes = node.value if isinstance(node, SequenceNode) else [node]
        for parent in nodes:
            if not isinstance(parent, MappingNode):
                raise YamlProblem("<< must name mappings", line=node.start_mark.line + 1, path=path)
            with self._inside(parent, path):
                merged = self._mapping(parent, path)
            yield merged


def _key(node: Node, path: FieldPath) -> str:
    value = _scalar(node, path) if isinstance(node, ScalarNode) else None
    if not isinstance(value, str):
        raise YamlProblem("a key must be a text; quote it", line=node.start_mark.line + 1, path=path)
    return value


def _scalar(node: ScalarNode, path: FieldPath) -> Any:
    text: str = node.value
    line = node.start_mark.line + 1
    plain = node.style is None
    match str(node.tag).removeprefix(_TAG):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            if plain and _OLD_OCTAL.fullmatch(text):
                raise YamlProblem(
                    f"{text} is octal for kubectl; write 0o{text.lstrip('+-0')} or drop the leading zero",
                    line=line,
                    path=path,
                )
            return _int(text, line, path)
        case "float":
            return _float(text, line, path)
        case "str" | "timestamp":
            if plain and _OLD_BOOLEANS.fullmatch(text):
                raise YamlProblem(
                    f"{text} is a text in YAML 1.2 and a boolean for kubectl; "
                    f'write true or false, or "{text}" in quotes',
                    line=line,
                    path=path,
                )
            return text
    raise YamlProblem(f"tag {node.tag} is not known here; remove it", line=line, path=path)


def _int(text: str, line: int, path: FieldPath) -> int:
    try:
        return int(text.replace("_", ""), 0)
    except ValueError as error:
        raise _no_number(text, line, path) from error


def _no_number(text: str, line: int, path: FieldPath) -> YamlProblem:
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return YamlProblem(f"{shown} cannot be read as a number; correct or shorten it", line=line, path=path)


def _float(text: str, line: int, path: FieldPath) -> int | float:
    # Python's float() accepts inf and nan without YAML's dot; neither can be expressed in JSON.
    try:
        value = float(
            text.replace("_", "").replace(".inf", "inf").replace(".INF", "inf").lower().replace(".nan", "nan")
        )
    except ValueError as error:
        raise _no_number(text, line, path) from error
    if not math.isfinite(value):
        raise YamlProblem(f"{text} cannot be written in JSON; give a finite number", line=line, path=path)
    # kubectl sends 5e8 and 1.0 as whole numbers; the same file must give the same configuration everywhere.
    return int(value) if value.is_integer() and abs(value) < 1e21 else value
