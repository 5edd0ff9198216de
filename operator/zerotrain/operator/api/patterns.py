"""Regular expressions whose time is bounded by their size times the text's, whoever wrote either.

`failurePolicy.rules` hold patterns of one tenant and are matched inside an operator that serves all, against
texts that training programs wrote. Python's `re` backtracks and takes exponential time on both; this is the
construction that RE2 uses (states in parallel, no backtracking), for the part of RE2's syntax that a person
writes into a rule. Compiled when a job is read, matched by the failure policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

MAX_PATTERN_LENGTH = 256
MAX_INSTRUCTIONS = 256
"""Of one pattern, with counted repetitions written out."""

_MAX_DEPTH = 16
_MAX_COUNT = 100


class PatternError(ValueError):
    """The pattern cannot be used; the message says which part and what to write instead."""


@dataclass(frozen=True, slots=True)
class _Chars:
    """A set of characters."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool = False

    def has(self, char: str) -> bool:
        return any(low <= char <= high for low, high in self.ranges) is not self.negated

    def ascii(self) -> frozenset[str]:
        """What of ASCII is in it."""
        return frozenset(char for char in map(chr, range(128)) if self.has(char))


class _Assertion(Enum):
    """What must hold between two characters."""

    START = "^"
    END = "$"
    WORD_EDGE = r"\b"
    NO_WORD_EDGE = r"\B"


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    options: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    low: int
    high: int | None


_Node = _Chars | _Assertion | _Sequence | _Either | _Repeat


class _Match(Enum):
    """The instruction that ends a program."""

    FOUND = "found"


@dataclass(frozen=True, slots=True)
class _Split:
    """Go on at all of these places."""

    targets: tuple[int, ...]


_Instruction = _Chars | _Assertion | _Split | _Match

_DIGITS = (("0", "9"),)
_WORD = (("0", "9"), ("A", "Z"), ("_", "_"), ("a", "z"))
_SPACE = ((" ", " "), ("\t", "\n"), ("\f", "\r"))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
_ANY_BUT_NEWLINE = _Chars((("\n", "\n"),), negated=True)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern."""

    program: tuple[_Instruction, ...]
    ignores_case: bool
    members: tuple[frozenset[str], ...]
    """For each instruction that wants a character: those of ASCII that will do; empty for the others."""

    def found_in(self, text: str) -> bool:
        """Whether some part of `text` matches; at most len(program) x (len(text) + 1) small steps."""
        if self.ignores_case:
            text = text.lower()
        program, members = self.program, self.members
        waiting: list[int] = []
        before: str | None = None
        for char in (*text, None):
            seen, places, following = bytearray(len(program)), [0, *waiting], list[int]()
            while places:
                pc = places.pop()
                if seen[pc]:
                    continue
                seen[pc] = 1
                step = program[pc]
                if type(step) is _Chars:
                    if char is not None and (char in members[pc] or (char > "\x7f" and step.has(char))):
                        following.append(pc + 1)
                elif type(step) is _Split:
                    places += step.targets
                elif step is _Match.FOUND:
                    return True
                elif _holds(step, before, char):
                    places.append(pc + 1)
            waiting, before = following, char
        return False


@lru_cache(maxsize=1024)
def compiled(text: str) -> Pattern:
    """Raises PatternError."""
    if len(text) > MAX_PATTERN_LENGTH:
        raise PatternError(f"is {len(text)} characters long; at most {MAX_PATTERN_LENGTH} are taken")
    ignores_case = text.startswith("(?i)")
    tree = _Parser(text.removeprefix("(?i)"), ignores_case=ignores_case).parse()
    size = _size(tree) + 1
    if size > MAX_INSTRUCTIONS:
        raise PatternError(f"comes to {size} instructions, at most {MAX_INSTRUCTIONS} are taken: repeat less")
    program: list[_Instruction] = []
    _emit(tree, program)
    program.append(_Match.FOUND)
    members = tuple(step.ascii() if isinstance(step, _Chars) else frozenset[str]() for step in program)
    return Pattern(tuple(program), ignores_case, members)


def _holds(assertion: _Instruction, before: str | None, after: str | None) -> bool:
    if assertion is _Assertion.START:
        return before is None
    if assertion is _Assertion.END:
        return after is None
    edge = _is_word(before) is not _is_word(after)
    return edge if assertion is _Assertion.WORD_EDGE else not edge


def _is_word(char: str | None) -> bool:
    return char is not None and _Chars(_WORD).has(char)


def _size(node: _Node) -> int:
    """Instructions that the node becomes; counted before anything is written out."""
    match node:
        case _Sequence(parts):
            return sum(map(_size, parts))
        case _Either(options):
            return 1 + sum(_size(option) + 1 for option in options)
        case _Repeat(part, low, high):
            each = _size(part)
            return each * low + (each + 2 if high is None else (each + 1) * (high - low))
        case _:
            return 1


def _emit(node: _Node, program: list[_Instruction]) -> None:
    match node:
        case _Sequence(parts):
            for part in parts:
                _emit(part, program)
        case _Either(options):
            _emit_either(options, program)
        case _Repeat(part, low, high):
            _emit_repeat(part, low, high, program)
        case leaf:
            program.append(leaf)


def _emit_either(options: tuple[_Node, ...], program: list[_Instruction]) -> None:
    fork, starts, ends = len(program), [], []
    program.append(_Split(()))
    for option in options:
        starts.append(len(program))
        _emit(option, program)
        ends.append(len(program))
        program.append(_Split(()))
    program[fork] = _Split(tuple(starts))
    for end in ends:
        program[end] = _Split((len(program),))


def _emit_repeat(part: _Node, low: int, high: int | None, program: list[_Instruction]) -> None:
    for _ in range(low):
        _emit(part, program)
    if high is None:
        fork = len(program)
        program.append(_Split(()))
        _emit(part, program)
        program.append(_Split((fork,)))
        program[fork] = _Split((fork + 1, len(program)))
        return
    for _ in range(high - low):
        fork = len(program)
        program.append(_Split(()))
        _emit(part, program)
        program[fork] = _Split((fork + 1, len(program)))


class _Parser:
    """Recursive descent; every method leaves `_at` behind what it read."""

    def __init__(self, text: str, *, ignores_case: bool) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self._ignores_case = ignores_case

    def parse(self) -> _Node:
        tree = self._either()
        if self._at < len(self._text):
            raise PatternError("has a ) that nothing opened; write \\) for the character")
        return tree

    def _peek(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise PatternError("ends in the middle of an escape, a class or a group")
        self._at += 1
        return char

    def _either(self) -> _Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Either(tuple(options))

    def _sequence(self) -> _Node:
        parts = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return _Sequence(tuple(parts))

    def _repeated(self, part: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return part
        if self._peek() == "?":  # a lazy one finds the same texts
            self._at += 1
        if self._peek() in ("*", "+", "?") or self._counts() is not None:
            raise PatternError("repeats a repetition; put the inner one into ( )")
        return _Repeat(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if simple is not None:
            self._at += 1
            return simple
        counted = self._counts()
        if counted is None:
            return None
        low, high, length = counted
        if max(low, high or 0) > _MAX_COUNT or (high is not None and high < low):
            told = self._peek(length)
            raise PatternError(f"repeats {told}; counts go up to {_MAX_COUNT}, the lower one first")
        self._at += length
        return low, high

    def _counts(self) -> tuple[int, int | None, int] | None:
        """The numbers in {n}, {n,} or {n,m} and its length; None for a { that stands for itself."""
        if self._peek() != "{":
            return None
        inner, closed, _ = self._text[self._at + 1 :].partition("}")
        low, comma, high = inner.partition(",")
        if not closed or not _is_count(low) or not (high == "" or _is_count(high)):
            return None
        top = int(high) if high else None if comma else int(low)
        return int(low), top, len(inner) + 2

    def _atom(self) -> _Node:
        char = self._take()
        match char:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return _ANY_BUT_NEWLINE
            case "^":
                return _Assertion.START
            case "$":
                return _Assertion.END
            case "*" | "+" | "?":
                raise PatternError(f"has a {char} with nothing to repeat; write \\{char} for the character")
            case "\\":
                return self._escape()
        return self._chars(((char, char),))

    def _group(self) -> _Node:
        if self._peek(2) == "?:":
            self._at += 2
        elif self._peek() == "?":
            raise PatternError(
                f"has (?{self._peek(2)[1:]}; only (?: and a leading (?i) are taken, no look-around, no names"
            )
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"nests more than {_MAX_DEPTH} groups")
        inner = self._either()
        if self._peek() != ")":
            raise PatternError("has a ( that nothing closes; write \\( for the character")
        self._at += 1
        self._depth -= 1
        return inner

    def _escape(self) -> _Node:
        if self._peek() in ("b", "B"):
            return _Assertion.WORD_EDGE if self._take() == "b" else _Assertion.NO_WORD_EDGE
        ranges, negated = self._escaped()
        return _Chars(ranges, negated) if negated or len(ranges) > 1 else self._chars(ranges)

    def _escaped(self) -> tuple[tuple[tuple[str, str], ...], bool]:
        """What follows a backslash, as ranges; the second value says that they are excluded."""
        char = self._take()
        if char.lower() in _CLASSES:
            return _CLASSES[char.lower()], char.isupper()
        if char in _CONTROLS:
            return ((_CONTROLS[char], _CONTROLS[char]),), False
        if char.isascii() and char.isalnum():
            raise PatternError(f"has \\{char}; only b B d D f n r s S t w W are taken after a \\")
        return ((char, char),), False

    def _class(self) -> _Node:
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[str, str]] = []
        first = True
        while first or self._peek() != "]":
            if self._peek(2) == "[:":
                raise PatternError("has [:...:] in a class; write its ranges")
            ranges += self._class_item()
            first = False
        self._at += 1
        return self._chars(tuple(ranges), negated=negated)

    def _class_item(self) -> tuple[tuple[str, str], ...]:
        low = self._class_char()
        if len(low) > 1 or low[0][0] != low[0][1]:
            return low
        if self._peek() != "-" or self._peek(2) in ("-]", "-"):
            return low
        self._at += 1
        high = self._class_char()
        if len(high) > 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
            raise PatternError(f"has the range {low[0][0]}-... in a class, which has no end or is backwards")
        return ((low[0][0], high[0][0]),)

    def _class_char(self) -> tuple[tuple[str, str], ...]:
        char = self._take()
        if char != "\\":
            return ((char, char),)
        ranges, negated = self._escaped()
        if negated:
            raise PatternError("has \\D, \\S or \\W inside a class; write the class without it")
        return ranges

    def _chars(self, ranges: tuple[tuple[str, str], ...], *, negated: bool = False) -> _Chars:
        """With (?i) the text is lowered before it is matched, so the set takes lower-case letters."""
        if not self._ignores_case:
            return _Chars(ranges, negated)
        lowered = [
            (max(low, "A").lower(), min(high, "Z").lower())
            for low, high in ranges
            if max(low, "A") <= min(high, "Z")
        ]
        single = [(low.lower(), low.lower()) for low, high in ranges if low == high and len(low.lower()) == 1]
        return _Chars((*ranges, *lowered, *single), negated)


def _is_count(text: str) -> bool:
    return 0 < len(text) <= 4 and text.isascii() and text.isdigit()
