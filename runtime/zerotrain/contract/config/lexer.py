"""Conversion of tolerant JSON into strict JSON of the same length, for `reader.py`.

Comments, odd spaces and trailing commas become plain spaces. Since the length is the same, every line and
column that `json` reports is a line and column of the user's file.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from zerotrain.contract.strict_json import JsonError, strict_json

from .errors import ConfigError
from .keys import ENDLESS

MAX_DEPTH = 64
"""Deepest nesting of objects and lists.

Real files use four levels. It is far below the recursion limit of the JSON parser.
"""

_PUNCTUATION = "{}[],:"
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_BARE = re.compile(r"[^\s{}\[\],:\"#/\u00ad\u200b-\u200f\u2060\ufeff]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*(?:_\d+)*)(?:\.\d+(?:_\d+)*)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = frozenset({"true", "false", "null"})
_WORD_HINTS = {
    "True": "Write true in lower case.",
    "False": "Write false in lower case.",
    "None": "Write null instead of None.",
    "NaN": "JSON has no NaN: write a finite number.",
    "Infinity": "JSON has no Infinity: write a finite number.",
    "-Infinity": "JSON has no Infinity: write a finite number.",
}
_STRAY_QUOTES = "'`“”„‘’«»"


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A piece of the text: one punctuation character, `string` or `scalar`."""

    kind: str
    start: int
    text: str


def locate(text: str, offset: int) -> tuple[int, int]:
    """Return the line and column (both from 1) of an offset."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def position(origin: str, text: str, offset: int) -> str:
    """Return the position of an offset as `file:line:column`."""
    line, column = locate(text, offset)
    return f"{origin}:{line}:{column}"


def to_strict_json(text: str, *, origin: str) -> str:
    """Return strict JSON in which every token is at its old position.

    Raises ConfigError with the position of an open string or comment, a word that is not JSON, a key that is
    repeated in one object, or nesting deeper than `MAX_DEPTH`. Other syntax errors are left to `json`.
    """
    tokens = _tokenize(text, origin)
    _check_structure(tokens, text, origin)
    strict = [character if character == "\n" else " " for character in text]
    for token, piece in zip(tokens, _pieces(tokens), strict=True):
        strict[token.start : token.start + len(token.text)] = piece.ljust(len(token.text))
    return "".join(strict)


def _pieces(tokens: list[Token]) -> list[str]:
    """Return the new text of each token.

    Numbers lose their underscores, and a comma before a closing bracket disappears.
    """
    pieces = []
    for index, token in enumerate(tokens):
        before, after = _kind(tokens, index - 1), _kind(tokens, index + 1)
        trailing = token.kind == "," and after in ("}", "]") and before not in ("{", "[", ",", ":", "")
        if trailing:
            pieces.append("")
        elif token.kind == "scalar":
            pieces.append(token.text.replace("_", ""))
        else:
            pieces.append(token.text)
    return pieces


def _kind(tokens: list[Token], index: int) -> str:
    """Return the kind of a token, or "" before the first and after the last."""
    return tokens[index].kind if 0 <= index < len(tokens) else ""


def _tokenize(text: str, origin: str) -> list[Token]:
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        if _is_space(text[at]):
            at += 1
        elif text[at] == "#" or text.startswith(("//", "/*"), at):
            at = _skip_comment(text, at, origin)
        else:
            token = _next_token(text, at, origin, may_be_endless=_follows_endless_key(tokens))
            tokens.append(token)
            at += len(token.text)
    return tokens


def _is_space(character: str) -> bool:
    # NBSP and similar spaces are Zs, byte order marks and zero-width spaces Cf; text copied from web pages
    # has many.
    return character.isspace() or unicodedata.category(character) in ("Zs", "Cf")


def _skip_comment(text: str, at: int, origin: str) -> int:
    if not text.startswith("/*", at):
        end = text.find("\n", at)
        return len(text) if end < 0 else end
    end = text.find("*/", at + 2)
    if end < 0:
        raise ConfigError(
            position(origin, text, at),
            "a comment that starts with /* must end",
            text[at : at + 20],
            "Add */ where the comment ends.",
        )
    return end + 2


def _follows_endless_key(tokens: list[Token]) -> bool:
    return len(tokens) > 1 and tokens[-1].kind == ":" and tokens[-2].text.strip('"') in ENDLESS


def _next_token(text: str, at: int, origin: str, *, may_be_endless: bool) -> Token:
    if text[at] in _PUNCTUATION:
        return Token(kind=text[at], start=at, text=text[at])
    if text[at] == '"':
        match = _STRING.match(text, at)
        if match is None:
            raise ConfigError(
                position(origin, text, at),
                "a text must end with a double quote on its own line",
                text[at:].partition("\n")[0],
                'Add the closing " or write a line break as \\n.',
            )
        return Token(kind="string", start=at, text=match.group())
    match = _BARE.match(text, at)
    word = match.group() if match else text[at]
    is_known = word in _WORDS or (may_be_endless and word == "Infinity")
    if not is_known and not _NUMBER.fullmatch(word):
        raise ConfigError(
            position(origin, text, at),
            "a value must be a number, true, false, null, or a text in double quotes",
            word,
            _hint(word),
        )
    return Token(kind="scalar", start=at, text=word)


def _hint(word: str) -> str:
    if word in _WORD_HINTS:
        return _WORD_HINTS[word]
    if word[0] in _STRAY_QUOTES:
        return 'Use the plain double quote: ".'
    if word[0] in "+.0123456789-":
        return "Write the number as JSON does: 0.5, 5e8, -1."
    return f'Put it in double quotes: "{word}".'


def _check_structure(tokens: list[Token], text: str, origin: str) -> None:
    """Check nesting and repeated keys. All other checks are left to the JSON parser."""
    open_objects: list[dict[str, int] | None] = []
    for index, token in enumerate(tokens):
        if token.kind in ("{", "["):
            if len(open_objects) == MAX_DEPTH:
                raise ConfigError(
                    position(origin, text, token.start),
                    f"objects and lists may nest {MAX_DEPTH} deep",
                    token.text,
                    "This is not a training configuration; check which file was given.",
                )
            open_objects.append({} if token.kind == "{" else None)
        elif token.kind in ("}", "]"):
            if open_objects:
                open_objects.pop()
        elif token.kind == "string" and open_objects and _kind(tokens, index + 1) == ":":
            _check_key(open_objects[-1], token, text, origin)


def _check_key(seen: dict[str, int] | None, token: Token, text: str, origin: str) -> None:
    if seen is None:
        return
    try:
        key = strict_json(token.text, max_bytes=len(token.text))
    except JsonError:
        return  # a bad escape: the JSON parser reports it with its position
    if key in seen:
        line, column = locate(text, seen[key])
        raise ConfigError(
            position(origin, text, token.start),
            f"a key may stand once in an object, and this one stands at line {line}, column {column} already",
            key,
            "Remove one of the two.",
        )
    seen[key] = token.start
