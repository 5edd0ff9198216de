"""Commands and PromQL that runbooks tell their readers to type, from blocks and from inline code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.test_repo_shape import ROOT

FOLDER = ROOT / "docs" / "runbooks"
_FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<body>.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`((?:kubectl|zerotrain|helm) [^`]+)`")
_CAPITALS = re.compile(r"(?<![$\w])[A-Z][A-Z_]+\b")
KINDS = {"sh", "promql"}
PLACEHOLDERS = frozenset(
    {"JOB", "NAMESPACE", "POD", "NODE", "RANK", "ATTEMPT", "CODE", "FOLDER", "IMAGE"}
    | {"OPERATOR_NAMESPACE", "DCGM_POD"}
)
"""Words that readers replace; no others are placeholders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One line of a block, or inline code."""

    runbook: str
    text: str

    def filled(self, values: Mapping[str, str]) -> str:
        """Return the text with the placeholders' values; placeholders without a value stay."""
        return _CAPITALS.sub(lambda match: values.get(match[0], match[0]), self.text)

    def placeholders(self) -> set[str]:
        """Return the words in capitals, without variables and a keyword of nvidia-smi."""
        return set(_CAPITALS.findall(self.text)) - {"PERFORMANCE"}

    def words(self) -> list[str]:
        """Return the words of the first program, up to a pipe."""
        words = shlex.split(self.text)
        return words[: words.index("|")] if "|" in words else words


def commands(*, inline: bool = False) -> list[Shown]:
    """Return the lines of the `sh` blocks; with `inline` also the inline code of the text."""
    found = list(_lines("sh"))
    if inline:
        for path in sorted(FOLDER.glob("*.md")):
            text = _FENCE.sub("", path.read_text(encoding="utf-8"))
            found += [Shown(runbook=path.stem, text=" ".join(m[1].split())) for m in _INLINE.finditer(text)]
    return found


def queries() -> list[Shown]:
    """Return the lines of the `promql` blocks: one query each."""
    return list(_lines("promql"))


def kinds() -> set[str]:
    """Return the languages of all fenced blocks."""
    texts = (path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md"))
    return {match["kind"] for text in texts for match in _FENCE.finditer(text)}


def _lines(kind: str) -> Iterator[Shown]:
    for path in sorted(FOLDER.glob("*.md")):
        for match in _FENCE.finditer(path.read_text(encoding="utf-8")):
            if match["kind"] == kind:
                for line in match["body"].splitlines():
                    yield Shown(runbook=path.stem, text=line)
