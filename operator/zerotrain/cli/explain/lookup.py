"""Lookup of the meaning of a word that the product or a cluster has shown."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from zerotrain.cli.errors import CliError
from zerotrain.cli.explain import alerts, reasons
from zerotrain.client.command_exits import COMMAND_EXITS
from zerotrain.contract.exit_codes import EXIT_CODES, ExitCodeMeaning, meaning_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """One answer: a name and the facts about it."""

    kind: str
    """Kind of the name: exit code, alert, condition, reason, metric, recorded metric or configuration key."""
    name: str
    facts: tuple[tuple[str, str], ...]
    """Pairs of title and text, in the order of printing. A text may have several lines."""


def explain_word(word: str) -> list[Topic]:
    """Return everything of this name. Raises CliError that suggests similar names."""
    finders = (exit_code, command_exit, alert, condition, reason, metric, recorded_metric, key)
    return topics(word, finders, "a name", all_names())


def topics(
    word: str, finders: Iterable[Callable[[str], Topic | None]], kind: str, names: Iterable[str]
) -> list[Topic]:
    """Return what the finders give for a word. Raises CliError that suggests similar names."""
    found = [topic for find in finders if (topic := find(word)) is not None]
    if not found:
        raise unknown(word, kind, names)
    return found


def unknown(word: str, kind: str, names: Iterable[str]) -> CliError:
    """Return the error for an unknown word, with the nearest names."""
    known = {name.casefold(): name for name in names}
    folded = word.casefold()
    near = difflib.get_close_matches(folded, known, n=4, cutoff=0.6)
    near += [name for name in known if len(folded) > 3 and folded in name and name not in near][:4]
    hint = (
        f"did you mean {', '.join(known[name] for name in near)}?" if near else "see zerotrain explain --help"
    )
    return CliError(f"{word!r} is not {kind} that zerotrain knows", next_step=hint)


def all_names() -> Iterator[str]:
    """Yield the names of every kind."""
    yield from exit_code_names()
    yield from alerts.alerts()
    yield from reasons.CONDITIONS
    yield from reasons.REASONS
    yield from metric_names()
    yield from key_names()
    yield from alerts.recorded()


def exit_code(word: str) -> Topic | None:
    """Find an exit code of a worker by number or by name (`84`, `SPILL_INTEGRITY`)."""
    row: ExitCodeMeaning | None = None
    if word.isascii() and word.isdigit() and int(word) <= 255:
        only_commands = (
            {item.code for item in COMMAND_EXITS} - {item.code for item in EXIT_CODES} - {1, 2, 130}
        )
        row = meaning_of(int(word)) if int(word) not in only_commands else None
    else:
        plain = word.upper().replace("-", "_")
        row = next((item for item in EXIT_CODES if item.name == plain), None)
    if row is None:
        return None
    facts = (("Meaning", row.meaning), ("Retried", _RETRIES[row.retry.value]), ("What to do", row.way_out))
    return Topic(kind="exit code", name=f"{row.code} {row.name}", facts=facts)


def command_exit(word: str) -> Topic | None:
    """Find an exit code of a command by number or by name."""
    plain = word.upper().replace("-", "_")
    row = next((item for item in COMMAND_EXITS if plain in (str(item.code), item.name)), None)
    if row is None:
        return None
    facts = (("Meaning", row.meaning), ("What to do", row.way_out))
    return Topic(kind="exit code of a command", name=f"{row.code} {row.name}", facts=facts)


def alert(word: str) -> Topic | None:
    """Find an alert, with its runbook."""
    found = alerts.find(word)
    if found is None:
        return None
    holds = f"for {found.duration}" if found.duration else "at once"
    return Topic(
        kind="alert",
        name=found.name,
        facts=(
            ("Severity", found.severity),
            ("Summary", found.summary),
            *found.runbook.items(),
            ("Fires", f"{holds}, when\n{found.expression}"),
            ("Runbook", found.runbook_url),
        ),
    )


def condition(word: str) -> Topic | None:
    row = reasons.meaning_of_condition(word)
    return None if row is None else _of_meaning(row)


def reason(word: str) -> Topic | None:
    row = reasons.meaning_of_reason(word)
    return None if row is None else _of_meaning(row)


def _of_meaning(row: reasons.Meaning) -> Topic:
    return Topic(kind=row.kind, name=row.name, facts=(("Meaning", row.meaning), ("What to do", row.way_out)))


def metric(word: str) -> Topic | None:
    """Find a metric family by its name or by that of one of its samples (`..._bucket`)."""
    from zerotrain.contract import metrics

    name = word if word.startswith("zerotrain_") else f"zerotrain_{word}"
    spec = metrics.find(name)
    if spec is None:
        return None
    lines = metrics.explain(name).splitlines()
    return Topic(
        kind="metric",
        name=spec.name,
        facts=(
            ("Type", spec.kind.value),
            ("Meaning", spec.help),
            ("Details", "\n".join(line.strip() for line in lines[2:])),
        ),
    )


def recorded_metric(word: str) -> Topic | None:
    """Find a recording rule and the expression that it computes."""
    expression = alerts.recorded().get(word)
    if expression is None:
        return None
    return Topic(kind="recorded metric", name=word, facts=(("Computed as", expression),))


def key(word: str) -> Topic | None:
    """Find a key of the DeepSpeed-style configuration, by its dotted path or an unambiguous last part."""
    from zerotrain.contract.config.table import KEYS

    rows = [row for row in KEYS if row.path == word] or [
        row for row in KEYS if row.path.rpartition(".")[2] == word or word in row.aliases
    ]
    if len(rows) != 1:
        return None
    row = rows[0]
    choices = ", ".join(str(choice.value) for choice in row.choices)
    facts = (
        ("Effect", row.effect),
        ("Status", row.status.value),
        ("Note", " ".join(filter(None, (row.note, row.way_out)))),
        ("Default", "none" if row.default is None else str(row.default)),
        ("Values", choices or row.kind.value),
    )
    return Topic(kind="configuration key", name=row.path, facts=tuple(item for item in facts if item[1]))


def exit_code_names() -> Iterator[str]:
    for row in EXIT_CODES:
        yield str(row.code)
        yield row.name
    for item in COMMAND_EXITS:
        yield item.name


def metric_names() -> Iterator[str]:
    from zerotrain.contract import metrics

    for spec in metrics.ALL_METRICS:
        yield spec.name


def key_names() -> Iterator[str]:
    from zerotrain.contract.config.table import KEYS

    for row in KEYS:
        yield row.path


_RETRIES = {
    "success": "no need",
    "never": "never: the same attempt would end the same way",
    "yield": "resumes by itself; not a failure and charged to no budget",
    "infrastructure": "yes, charged to failurePolicy.maxInfrastructureRestarts",
    "another-node-once": "once, on another node; then the job fails",
    "application": "yes, charged to failurePolicy.maxRestarts",
    "by-pod-reason": "depends on the pod's reason: OOMKilled, Evicted, Preempted or a lost node",
}
