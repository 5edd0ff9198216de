"""The only loader of job files, for `zerotrain run`, `config show` and all other commands.

Every error names the file, the line, the field, the rule and the value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from zerotrain.client.yaml_document import Document, FieldPath, YamlProblem, read_documents
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import API_VERSION, KIND

MAX_FILE_BYTES = 1 << 20
"""Maximum size of a job file; etcd accepts no larger object."""

MAX_PROBLEMS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One error to correct."""

    path: str
    """Field such as spec.model.gpt.dModel; empty for the file as a whole."""
    line: int
    message: str


class JobFileError(ValueError):
    """Error for a job file that cannot be used; `problems` holds everything that was found."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        for problem in self.problems[:MAX_PROBLEMS]:
            field = f"{problem.path}: " if problem.path else ""
            yield f"{self.source}:{problem.line}: {field}{problem.message}"
        if len(self.problems) > MAX_PROBLEMS:
            yield f"{self.source}: {len(self.problems) - MAX_PROBLEMS} more"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigPlace:
    """Source of a configuration that is not in spec.config."""

    name: str
    """Name for messages, such as `ConfigMap ds, key ds.json`."""
    line: int
    """Line in the job file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFile:
    """Job with the line of each of its fields."""

    job: ZeroTrainingJob
    source: str
    document: Document
    others: tuple[Document, ...] = ()
    """Documents of the file besides the job, which are for kubectl."""
    config_place: ConfigPlace | None = None
    """Source of the values in spec.config, where the file itself does not have them there."""

    def check(self) -> None:
        """Raise JobFileError for what the operator would reject, apart from what the loader has rejected."""
        # Imported late: a job that the API server checks by itself needs only the models.
        from zerotrain.operator.api.validation import refusals

        if found := refusals(self.job.spec):
            raise self.error((item.path, item.message) for item in found)

    def error(self, problems: Iterable[tuple[str, str]]) -> JobFileError:
        """Return an error about (field, message) pairs that were found after loading."""
        return JobFileError(self.source, [self._problem(path, message) for path, message in problems])

    def _problem(self, path: str, message: str) -> Problem:
        place = self.config_place
        if place is not None and f"{path}.".startswith("spec.config."):
            key = path.removeprefix("spec.config").removeprefix(".")
            return Problem(path=": ".join(filter(None, (place.name, key))), line=place.line, message=message)
        return Problem(path=path, line=self.document.line_of(_parts(path)), message=message)


def load_job(path: Path) -> JobFile:
    """Read the ZeroTrainingJob of a file. Raises JobFileError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _whole_file(str(path), f"cannot be read: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise _whole_file(str(path), f"has {len(raw)} bytes; a job may have {MAX_FILE_BYTES}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _whole_file(
            str(path), f"is not UTF-8: byte {error.start} is {raw[error.start]:#04x}"
        ) from error
    return parse_job(text, source=str(path))


def parse_job(text: str, *, source: str) -> JobFile:
    """Parse a ZeroTrainingJob from text; `source` is its name in errors. Raises JobFileError."""
    try:
        documents = read_documents(text)
    except YamlProblem as error:
        problem = Problem(path=dotted(error.path), line=error.line, message=error.message)
        raise JobFileError(source, [problem]) from error
    document = _the_job(documents, source)
    try:
        job = ZeroTrainingJob.parse(document.value)
    except ValidationError as error:
        raise JobFileError(source, [_problem(item, document) for item in error.errors()]) from error
    others = tuple(item for item in documents if item is not document)
    return JobFile(job=job, source=source, document=document, others=others)


def dotted(path: FieldPath) -> str:
    """Return the path as text, such as `spec.rules[0].action`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _the_job(documents: list[Document], source: str) -> Document:
    """Return the only job of the file, which may also contain a claim or a ConfigMap for kubectl."""
    jobs = [doc for doc in documents if isinstance(doc.value, dict) and doc.value.get("kind") == KIND]
    if len(jobs) == 1:
        return jobs[0]
    if len(jobs) > 1:
        raise _whole_file(source, f"holds {len(jobs)} objects of kind {KIND}; keep one per file")
    raise _whole_file(source, f"holds no object with apiVersion: {API_VERSION} and kind: {KIND}")


def _whole_file(source: str, message: str) -> JobFileError:
    return JobFileError(source, [Problem(path="", line=1, message=message)])


def _problem(error: ErrorDetails, document: Document) -> Problem:
    path = _existing(error["loc"], document)
    message = str(error["msg"])
    if error["type"] == "extra_forbidden":
        message = _unknown_key(path, error["loc"])
    elif error["type"] == "missing":
        message = "is missing; it has no default"
    elif isinstance(error["input"], str | int | float | bool):
        message = f"{message}; got {error['input']!r}"
    return Problem(path=dotted(path), line=document.line_of(path), message=message)


def _existing(loc: FieldPath, document: Document) -> FieldPath:
    """Return the path without the names of union members that pydantic puts between the fields: parts that
    the file has are kept, and the last one."""
    kept: FieldPath = ()
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if (*kept, part) in document.lines or (last and isinstance(part, str) and part.isidentifier()):
            kept = (*kept, part)
    return kept


def _unknown_key(path: FieldPath, loc: FieldPath) -> str:
    names = _fields_at(ZeroTrainingJob, loc[:-1])
    near = difflib.get_close_matches(str(path[-1]), names, n=1)
    hint = (
        f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(names))}" if names else ""
    )
    return f"is not a field here{hint}"


def _fields_at(model: type[BaseModel], loc: FieldPath) -> list[str]:
    """Return the names of the fields of that part of the API to which `loc` leads."""
    current: Any = model
    for part in loc:
        if isinstance(part, int):
            continue
        found = next(
            (info.annotation for name, info in current.model_fields.items() if part in (name, info.alias)),
            None,
        )
        nested = _model_in(found)
        if nested is None:
            return []
        current = nested
    return [info.alias or name for name, info in current.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation such as `Model | None` or `tuple[Rule, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (found := _model_in(argument)) is not None:
            return found
    return None


def _parts(path: str) -> FieldPath:
    return tuple(
        int(part[1:-1]) if part.startswith("[") else part for part in path.replace("[", ".[").split(".")
    )
