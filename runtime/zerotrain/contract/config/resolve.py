"""Resolution of the user's values into the final configuration, with a report on every key.

The steps are: `flatten` (names) -> settle (types, "auto", defaults) -> `rules` (between keys) -> verdicts
(what this version does with each value) -> `build`. The engine's `initialize`, the operator's admission, the
planner and `zerotrain config show` call it, so that all of them see the same configuration.
"""

from __future__ import annotations

from typing import Any

from .auto import RULES as AUTO_RULES
from .auto import AutoValues
from .build import build
from .coerce import Coercer, choose
from .draft import ConfigDraft, Settled
from .errors import ConfigError
from .flatten import Flattener, Given
from .keys import Choice, Key, Status, parent
from .reader import RawConfig
from .rules import RULES
from .schema import EngineConfig, KeyReport
from .table import KEYS

UNTESTED_OPTIMIZERS = ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
"""Element-wise classes of torch.optim that the table does not have."""

HIDDEN = "(hidden)"
"""Shown in place of a secret value."""

_FLATTENER = Flattener(KEYS)

_OTHERWISE = {
    "scheduler.type": "Take one of these, or pass one of torch's schedules as lr_scheduler of initialize."
}
"""Advice about a value that no choice of the key is near to."""

_TYPED_BLOCKS = {"optimizer.params": "optimizer.type", "scheduler.params": "scheduler.type"}


def resolve(
    raw: RawConfig, *, world_size: int, auto: AutoValues | None = None, keys: tuple[Key, ...] = KEYS
) -> EngineConfig:
    """Resolve a configuration for a number of data-parallel ranks.

    Args:
        raw: what `load` read.
        world_size: data-parallel ranks, at least 1.
        auto: what the caller knows for `"auto"`; None = nothing.
        keys: the table of keys (tests pass changed ones).

    Returns:
        The configuration. `unsupported` is not empty when the file asks for what this version does not run;
        the caller must refuse to start then.

    Raises:
        ConfigError: unknown key, wrong type or range, sizes that do not fit, keys that exclude each other.
    """
    if world_size < 1:
        raise ConfigError("world_size", "must be at least 1", world_size, "Start at least one rank.")
    flat = (_FLATTENER if keys is KEYS else Flattener(keys)).flatten(raw.values)
    draft = ConfigDraft(keys={key.path: key for key in keys}, flat=flat, world_size=world_size)
    draft.notices.extend(flat.notices)
    for key in keys:
        _settle(draft, key, auto or AutoValues())
    _check_unknown_params(draft)
    for rule in RULES:
        rule(draft)
    report = tuple(_key_report(draft, draft.keys[path]) for path in draft.keys if path in draft.settled)
    return build(draft, report, raw.values)


def _settle(draft: ConfigDraft, key: Key, auto: AutoValues) -> None:
    """Settle the value and origin of one key.

    Parameters of other optimizers and schedulers are left out.
    """
    given = draft.flat.given.get(key.path)
    default = key.default
    type_path = _TYPED_BLOCKS.get(parent(key.path))
    if type_path is not None:
        chosen = draft.value(type_path)
        if not _applies(draft, key, given, type_path):
            return
        default = key.default_by_type.get(chosen, default)
    if given is not None and isinstance(given.value, str) and given.value.casefold() == "auto":
        draft.settled[key.path] = _settle_auto(draft, key, given, auto, default)
    elif given is None and key.fill and AUTO_RULES[key.auto][1](auto) is not None:
        absent = Given(value="auto", written=key.path)
        draft.settled[key.path] = _settle_auto(draft, key, absent, auto, default)
    elif given is not None:
        value = _convert(draft, key, given.value, given.written)
        draft.settled[key.path] = Settled(value=value, origin="file", written=given.written)
    else:
        draft.settled[key.path] = Settled(value=default, origin="default", written=key.path)


def _applies(draft: ConfigDraft, key: Key, given: Given | None, type_path: str) -> bool:
    """Return whether the chosen optimizer or scheduler has this parameter.

    Raises ConfigError if the file sets a parameter that it does not have.
    """
    chosen = draft.value(type_path)
    if chosen is None:
        if given is not None:
            way_out = f"Set {type_path}, or remove the parameters."
            raise ConfigError(given.written, f"needs {type_path}", given.value, way_out)
        return False
    if not key.only or chosen in key.only:
        return True
    if draft.keys[type_path].choice(chosen) is None:
        return given is not None  # an optimizer outside the table: its parameters are unknown
    if given is not None:
        own = sorted(
            path.rpartition(".")[2]
            for path, row in draft.keys.items()
            if parent(path) == parent(key.path) and (not row.only or chosen in row.only)
        )
        raise ConfigError(
            given.written,
            f"is not a parameter of {chosen}",
            given.value,
            f"Remove it; {chosen} has {', '.join(own)}.",
        )
    return False


def _settle_auto(draft: ConfigDraft, key: Key, given: Given, auto: AutoValues, default: Any) -> Settled:
    needed, rule = AUTO_RULES.get(key.auto, ("", None))
    value = rule(auto) if rule is not None else None
    if value is not None:
        value = _convert(draft, key, value, given.written)
        return Settled(value=value, origin="auto", written=given.written)
    why = f"nobody says the {needed.replace('_', ' ')}" if needed else "there is no rule for it"
    instead = "as if the key were absent" if default is None else f"the default {default!r} is used"
    settled = Settled(value=default, origin="default", written=given.written)
    draft.settled[key.path] = settled
    draft.notice(key.path, f'"auto" could not be computed, because {why}: {instead}.')
    return settled


def _convert(draft: ConfigDraft, key: Key, value: Any, written: str) -> Any:
    coercer = Coercer(key, written)
    value = coercer.coerce(value)
    draft.settled[key.path] = Settled(value=value, origin="file", written=written)
    for remark in coercer.remarks:
        draft.notice(key.path, remark)
    if not key.choices:
        return value
    if key.path == "optimizer.type" and key.choice(value) is None:
        return _untested_optimizer(draft, key, value, written)
    return choose(key, value, written, otherwise=_OTHERWISE.get(key.path))


def _untested_optimizer(draft: ConfigDraft, key: Key, value: str, written: str) -> Any:
    """Return a class of torch.optim outside the table, if the file allows it and it works on shards."""
    given = draft.flat.given.get("zero_allow_untested_optimizer")
    is_allowed = given is not None and given.value is True
    name = next((name for name in UNTESTED_OPTIMIZERS if name.casefold() == value.casefold()), None)
    if name is not None and not is_allowed:
        raise ConfigError(
            "zero_allow_untested_optimizer",
            f"must be true for {name}, whose updates are torch's and not the engine's own",
            False,
            'Set it to true, or set optimizer.type to "AdamW".',
        )
    if name is None and is_allowed:
        draft.refuse_to_run(
            key.path,
            f"{value} is not an element-wise optimizer of torch.optim, and a rank holds parts of parameters.",
            'Set optimizer.type to "AdamW", or pass an element-wise optimizer to initialize.',
        )
        return value
    return name or choose(key, value, written)


def _check_unknown_params(draft: ConfigDraft) -> None:
    """Raise ConfigError for unknown parameters, unless the optimizer is one outside the table."""
    for block, params in draft.flat.unknown_params.items():
        chosen = draft.value(_TYPED_BLOCKS[block])
        if chosen is not None and draft.keys[_TYPED_BLOCKS[block]].choice(chosen) is None:
            continue
        for name, value in params.items():
            raise Flattener(tuple(draft.keys.values())).unknown(name, block, f"{block}.{name}", value)


def _key_report(draft: ConfigDraft, key: Key) -> KeyReport:
    """Return the report's line on a value, and record a notice or refusal if one is due."""
    settled = draft.settled[key.path]
    status, effect = Status.IMPLEMENTED, key.effect
    written_choice = _written_choice(draft, key)
    if key.path in draft.dropped:
        effect = draft.dropped[key.path]
    elif key.needs and not draft.is_on(key.needs):
        effect = f"No effect: {key.needs} is {_shown(draft.value(key.needs))}."
    elif written_choice is not None and written_choice.status is not None:
        status, effect = written_choice.status, _apply_status(draft, key, written_choice)
    elif key.status is not Status.IMPLEMENTED and not key.asks_for_nothing(settled.value):
        status, effect = key.status, _apply_status(draft, key, None)
    elif written_choice is not None and written_choice.note:
        effect = written_choice.note
    value = HIDDEN if key.is_secret and settled.value is not None else settled.value
    return KeyReport(path=key.path, value=value, origin=settled.origin, status=status.value, effect=effect)


def _written_choice(draft: ConfigDraft, key: Key) -> Choice | None:
    """Return the choice that the user named.

    A name that stands for another one has a status of its own.
    """
    if not key.choices:
        return None
    given = draft.flat.given.get(key.path)
    from_file = draft.settled[key.path].origin == "file"
    return key.choice(given.value if given is not None and from_file else draft.value(key.path))


def _apply_status(draft: ConfigDraft, key: Key, choice: Choice | None) -> str:
    """Record the notice or refusal, and return the effect to show."""
    source = key if choice is None else choice
    status = source.status
    if status is Status.REFUSED:
        raise draft.error(key.path, f"is refused: {source.note}", source.way_out)
    if status is Status.NOT_RUN:
        draft.refuse_to_run(key.path, source.note, source.way_out)
        return f"Not run: {source.note}"
    if status is Status.ACCEPTED:
        draft.notice(key.path, source.note)
        return source.note
    return key.effect


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
