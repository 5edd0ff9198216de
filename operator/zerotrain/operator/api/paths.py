"""Types for paths of files and folders. No path has a part `.` or `..`, or an empty one: rules compare paths
as text, so a path must name what it seems to name."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, StringConstraints

MAX_PATH_LENGTH: Final = 1024


def _part(excluded: str = r"\x00") -> str:
    """Return a pattern for one part of a path. RE2 has no look-ahead that could rule out `.` and `..`."""
    return rf"([^/.{excluded}]|\.[^/.{excluded}]|\.\.[^/{excluded}])[^/{excluded}]*"


PART: Final = _part()
_MOUNTABLE: Final = _part(r":\x00")
_FOLDER: Final = rf"^(/{_MOUNTABLE})+$"
_MOUNT: Final = rf"^(/{_MOUNTABLE})+/?$"
_FILE: Final = rf"^(/{PART})+/?$"
_EXPORT: Final = rf"^/({PART}(/{PART})*/?)?$"
_BELOW: Final = rf"^({PART}(/{PART})*/?)?$"
_ITEM: Final = rf"^([^/.\x00]|\.[^/.\x00])[^/\x00]*(/{PART})*$"

_DATA: Final = rf"^((/{PART})+/?|builtin:python-stdlib)$"

_RULE: Final = "without the parts '.' and '..', without '//' and NUL"
PATH_RULE: Final = f"must be an absolute path {_RULE}; write the path of the folder itself"


def _path(pattern: str, what: str, *, least: int = 2) -> tuple[Any, ...]:
    """Return the constraints of a path type: the pattern for the API server, and a check by the same pattern
    with a readable error for all other callers."""
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if compiled.fullmatch(text) is None:
            raise ValueError(f"must be {what} {_RULE}; got {text[:200]!r}; write the path itself")
        return text

    return (
        StringConstraints(min_length=least, max_length=MAX_PATH_LENGTH),
        AfterValidator(check),
        Field(json_schema_extra={"pattern": pattern}),
    )


AbsolutePath = Annotated[str, *_path(_FOLDER, "an absolute path without a colon and a final slash,")]
"""Path of a folder below the root."""

MountPath = Annotated[str, *_path(_MOUNT, "an absolute path without a colon,")]
FilePath = Annotated[str, *_path(_FILE, "an absolute path")]
ExportedPath = Annotated[str, *_path(_EXPORT, "an absolute path", least=1)]
"""Absolute path that may be the root of a file server."""

SubPath = Annotated[str, *_path(_BELOW, "a relative path", least=0)]
"""Folder of a volume; empty text is its root."""

RelativePath = Annotated[str, *_path(_ITEM, "a relative path that does not begin with '..',", least=1)]
DataPath = Annotated[str, *_path(_DATA, "an absolute path")]


PATH_FORMS: Final = {
    _FOLDER: "an absolute path without `.`, `..` and `//`, no colon, no final slash",
    _MOUNT: "an absolute path without `.`, `..` and `//`, no colon",
    _FILE: "an absolute path without `.`, `..` and `//`",
    _EXPORT: "an absolute path without `.`, `..` and `//`",
    _BELOW: "a relative path without `.`, `..` and `//`",
    _ITEM: "a relative path without `.`, `..` and `//`",
    _DATA: "an absolute path without `.`, `..` and `//`, or builtin:python-stdlib",
}
"""Descriptions of the patterns."""


def is_plain(path: str) -> bool:
    """Return whether the path matches FilePath."""
    return re.fullmatch(_FILE, path) is not None
