"""Handling of failures: restarts, their budgets, and rules by kind of failure, with their patterns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any

import re2
from pydantic import AfterValidator, Field, StringConstraints

from .base import ATOMIC, SET, ApiModel, Int, Seconds, rule

MAX_PATTERN_LENGTH = 256
MAX_MEMORY_BYTES = 256 << 10
"""Maximum memory in bytes of one compiled pattern and its matching; RE2 rejects a pattern whose program does
not fit a part of it."""


class PatternError(ValueError):
    """Error for a pattern that cannot be used; the message is RE2's."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled regular expression, whose matching time is bounded by its size times the length of the text,
    whoever wrote either.

    `failurePolicy.rules` hold patterns of one tenant and are matched inside an operator that serves all
    tenants, against texts that training programs wrote. Python's `re` backtracks and takes exponential time
    on such pairs; RE2 does not, and the API server's CEL uses it too. Patterns are compiled when a job is
    read, and matched by the failure policy.
    """

    expression: Any

    @property
    def num_instructions(self) -> int:
        """Size of the program; a search takes at most that many steps per byte."""
        return int(self.expression.programsize)

    def found_in(self, text: str) -> bool:
        """Return whether some part of `text` matches."""
        # Lone surrogates have no bytes; in the output of programs they stand for what was no text anyway.
        return self.expression.search(text.encode(errors="replace")) is not None


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> Pattern:
    """Compile a pattern. Raises PatternError."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise PatternError(f"a pattern has at most {MAX_PATTERN_LENGTH} characters; got {len(pattern)}")
    options = re2.Options()
    options.max_mem = MAX_MEMORY_BYTES
    options.log_errors = False
    try:
        return Pattern(re2.compile(pattern.encode(errors="replace"), options))
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if error.args else "refused"
        raise PatternError(f"{pattern!r} is not a regular expression in RE2's syntax: {reason}") from None


MAX_RANK = 639_999
"""Highest rank of a job of 10,000 workers of 64 ranks."""

MAX_ALL_INSTRUCTIONS = 8192
"""Maximum size of the patterns of all rules together, in RE2 instructions: bounds the operator's cost of one
failure."""


class FailureAction(StrEnum):
    """Actions of a rule."""

    FAIL_JOB = "FailJob"
    RESTART_ALL = "RestartAll"
    RESTART_ALL_IGNORE_BUDGET = "RestartAllIgnoreBudget"
    REPLACE_NODE_AND_RESTART = "ReplaceNodeAndRestart"
    SHRINK_AND_RESTART = "ShrinkAndRestart"


class FailureReason(StrEnum):
    """The reasons that `status.failures` shows."""

    RANK_FAILED = "RankFailed"
    """The program ended with an exit code that has no meaning of its own."""
    INIT_CONTAINER_FAILED = "InitContainerFailed"
    """An init container of podTemplate ended with an exit code; the ranks never started."""
    OUT_OF_MEMORY = "OutOfMemory"
    OOM_KILLED = "OOMKilled"
    """The kubelet's name for OutOfMemory, accepted in rules: the status shows OutOfMemory."""
    KILLED = "Killed"
    NODE_LOST = "NodeLost"
    POD_LOST = "PodLost"
    """Another client deleted the pod, or the pod does not end."""
    POD_REJECTED = "PodRejected"
    """The node rejected or dropped the pod."""
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    HANG = "Hang"
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    START_DEADLINE_EXCEEDED = "StartDeadlineExceeded"
    """Some worker did not start within runPolicy.startDeadlineSeconds."""
    STORAGE_FAILED = "StorageFailed"
    SPILL_INTEGRITY = "SpillIntegrity"
    PERMANENT_FAILURE = "PermanentFailure"
    """The exit code says that another attempt cannot help; see `zerotrain explain exit-codes`."""


def _usable(text: str) -> str:
    compiled(text)
    return text


MessagePattern = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_PATTERN_LENGTH), AfterValidator(_usable)
]


class FailureRule(ApiModel):
    """Action after a failure of a certain kind. All conditions of the rule must hold."""

    RULES = (
        rule(
            "has(self.onExitCodes) || has(self.onReasons) || has(self.onRanks) "
            "|| has(self.onMessagePatterns)",
            "at least one of onExitCodes, onReasons, onRanks, onMessagePatterns must be given",
            holds=lambda self: bool(
                self.on_exit_codes or self.on_reasons or self.on_ranks or self.on_message_patterns
            ),
        ),
        # An expression that the API server cannot compile is an error of the rule's evaluation, reported as
        # such.
        rule(
            "!has(self.onMessagePatterns) "
            "|| self.onMessagePatterns.all(pattern, ''.matches(pattern) in [true, false])",
            "onMessagePatterns must be regular expressions in RE2's syntax",
            holds=lambda self: all(map(_is_usable, self.on_message_patterns)),
            field_path=".onMessagePatterns",
        ),
    )

    on_exit_codes: Annotated[
        tuple[Annotated[Int, Field(ge=1, le=255)], ...],
        Field(min_length=1, max_length=64, json_schema_extra=SET),
    ] = ()
    """Exit codes of the first failing rank, or of the init container that failed before it started, 1 to 255;
    one of them must match. Any unless given."""

    on_reasons: Annotated[
        tuple[FailureReason, ...], Field(min_length=1, max_length=16, json_schema_extra=SET)
    ] = ()
    """Reasons of the failure as status.failures shows them; one of them must match. Any unless given."""

    on_ranks: Annotated[
        tuple[Annotated[Int, Field(ge=0, le=MAX_RANK)], ...],
        Field(min_length=1, max_length=256, json_schema_extra=SET),
    ] = ()
    """Ranks, 0 to 639999; the first failing rank must be one of them. If a whole worker failed and no rank
    can be named, one of the worker's ranks must be. Any unless given."""

    on_message_patterns: Annotated[
        tuple[MessagePattern, ...], Field(min_length=1, max_length=16, json_schema_extra=SET)
    ] = ()
    """Regular expressions (RE2's syntax: no look-around and no back-references; at most 256 characters); one
    of them must match in the failure's message or last line. Any unless given."""

    action: FailureAction
    """Action of the rule. FailJob ends the job. RestartAll starts a new attempt and charges the budget of the
    cause; RestartAllIgnoreBudget does not charge it. ReplaceNodeAndRestart is RestartAll and keeps the job
    off the node for nodeExclusionSeconds. ShrinkAndRestart is RestartAll with fewer workers, if spec.elastic
    allows it."""


class FailurePolicy(ApiModel):
    """Limits and rules for restarts after failures. All ranks restart together, from the last durable
    checkpoint."""

    max_restarts: Annotated[Int, Field(ge=0, le=1000)] = 5
    """Restarts after failures of the training program before the job fails; 0 to 1000, 5 unless given. Those
    within windowSeconds count, and older ones until a step is gained. Preemptions and lost nodes do not."""

    max_infrastructure_restarts: Annotated[Int, Field(ge=0, le=1000)] = 20
    """Restarts after lost nodes and pods, evictions and rendezvous that never completed before the job fails,
    counted as for maxRestarts; 0 to 1000, 20 unless given. Preemptions are without limit."""

    max_restarts_without_progress: Annotated[Int, Field(ge=1, le=1000)] = 20
    """Restarts in a row that gain no step before the job fails, whatever their cause and the rule that
    decided them; 1 to 1000, 20 unless given. Preemptions do not count."""

    window_seconds: Seconds = 3600
    """Length of the sliding window in which restarts are counted; 3600 unless given."""

    node_not_ready_seconds: Annotated[Int, Field(ge=10, le=31_536_000)] = 60
    """Seconds after which the workers of a node that is not ready count as lost, if no step completes
    meanwhile; 10 or more, 60 unless given. A node that is deleted or tainted out-of-service is lost at
    once."""

    node_exclusion_seconds: Seconds = 86400
    """Seconds for which the job avoids a node that ReplaceNodeAndRestart excluded; 86400 unless given."""

    rules: Annotated[
        tuple[FailureRule, ...],
        Field(max_length=32, json_schema_extra=ATOMIC),
        AfterValidator(lambda rules: _affordable(rules)),
    ] = ()
    """Rules by exit code, reason, rank or message; the first that matches decides, even if the built-in table
    would fail the job. May be changed at any time."""


def _is_usable(pattern: str) -> bool:
    try:
        compiled(pattern)
    except PatternError:
        return False
    return True


def _affordable(rules: tuple[FailureRule, ...]) -> tuple[FailureRule, ...]:
    size = sum(compiled(pattern).num_instructions for rule in rules for pattern in rule.on_message_patterns)
    if size > MAX_ALL_INSTRUCTIONS:
        raise ValueError(
            f"the patterns of all rules come to {size} instructions, at most {MAX_ALL_INSTRUCTIONS} are "
            "taken; use fewer or shorter ones"
        )
    return rules
