"""What a dashboard says, free of Grafana's JSON: `boards` writes these, `render` turns them into JSON.

Every panel must say what it shows, what is healthy and what to do, so `description` has no default; every
number has a unit; a threshold that stands for an alert names it, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Unit(Enum):
    """Grafana's unit ids. One per quantity, so that the same thing looks the same on every board."""

    SECONDS = "s"
    BYTES = "bytes"
    BYTES_PER_SECOND = "binBps"
    RATIO = "percentunit"
    COUNT = "short"
    NUMBER = "none"
    SCIENTIFIC = "sci"
    TOKENS_PER_SECOND = "si:tok/s"
    PER_SECOND = "cps"
    HERTZ = "hertz"
    CELSIUS = "celsius"
    WATTS = "watt"
    AGO = "dateTimeFromNow"
    """Takes milliseconds."""


class Kind(Enum):
    """Panel plugins, all part of Grafana itself."""

    TIME_SERIES = "timeseries"
    STAT = "stat"
    BAR_GAUGE = "bargauge"
    TABLE = "table"
    HEATMAP = "heatmap"
    STATE_TIMELINE = "state-timeline"
    STATUS_HISTORY = "status-history"
    TEXT = "text"


class Level(Enum):
    """What a colour means, on every board."""

    GOOD = "green"
    INFO = "blue"
    WARNING = "orange"
    CRITICAL = "red"
    NEUTRAL = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """One PromQL expression; `selectors.expand` fills in the placeholders."""

    expr: str
    legend: str = ""
    """Grafana's `{{label}}` form; empty for tables."""
    exemplars: bool = False
    """Show the steps behind a histogram's samples."""
    buckets: bool = False
    """The series are the buckets of a histogram, for a heatmap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """From `value` upwards the panel has the level's colour."""

    value: float
    level: Level
    alert: str | None = None
    """Alert that fires at this value, without the prefix ZeroTrain; its expression must hold the number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A value with a name and a colour."""

    value: float
    text: str
    level: Level


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table."""

    label: str
    """Label of the series, or `Value #A` of the query A."""
    title: str
    unit: Unit | None = None
    thresholds: tuple[Threshold, ...] = ()
    board: str | None = None
    """Clicking opens this board for the row's job."""
    hidden: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One panel. Its place on the grid follows from the order, `width` and `height`."""

    title: str
    description: str
    kind: Kind = Kind.TIME_SERIES
    queries: tuple[Query, ...] = ()
    unit: Unit = Unit.NUMBER
    width: int = 8
    """Of 24."""
    height: int = 8
    base: Level = Level.GOOD
    """Level below the first threshold."""
    thresholds: tuple[Threshold, ...] = ()
    states: tuple[State, ...] = ()
    columns: tuple[Column, ...] = ()
    """Of a table, in order; labels that are not named are hidden."""
    alerts: tuple[str, ...] = ()
    """Alerts that this panel explains: each becomes a link to its runbook."""
    minimum: float | None = None
    maximum: float | None = None
    stacked: bool = False
    logarithmic: bool = False
    text: str = ""
    """Markdown of a text panel."""
    no_value: str | None = None
    """Shown where a query has no series, when that is a good sign."""
    series_levels: tuple[tuple[str, Level], ...] = ()
    """Fixed colours of series, by legend, where a name has a meaning (Failed is red everywhere)."""
    shows_name: bool = False
    """A stat whose answer is the series' name, not its value (which phase)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


class Scope(Enum):
    """Which variables a board has, and so what its links carry on."""

    JOB = "job"
    """One job: datasource, namespace, job and ranks."""
    FLEET = "fleet"
    """All jobs of some namespaces."""
    OPERATOR = "operator"
    """The operator, wherever it runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """One dashboard, one file."""

    name: str
    """Of the file; with a prefix it is the uid that links use."""
    title: str
    description: str
    scope: Scope
    rows: tuple[Row, ...]

    @property
    def uid(self) -> str:
        return uid(self.name)

    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


def uid(name: str) -> str:
    """The uid of the board of that name; it never changes, links and bookmarks hold it."""
    return f"zerotrain-{name}"
