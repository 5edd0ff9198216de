"""The content of a dashboard, independent of Grafana's JSON.

`boards` creates these objects and `render` turns them into JSON. Every panel must state what it shows, which
values are healthy and what to do, so `description` has no default. Every number has a unit. A threshold that
stands for an alert names the alert, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Unit(Enum):
    """Unit ids of Grafana, one per quantity, so that a quantity looks the same on every board."""

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
    """Unit of a time stamp in milliseconds."""


class PanelKind(Enum):
    """Panel plugins, all part of Grafana itself."""

    TIME_SERIES = "timeseries"
    STAT = "stat"
    BAR_GAUGE = "bargauge"
    TABLE = "table"
    HEATMAP = "heatmap"
    STATE_TIMELINE = "state-timeline"
    STATUS_HISTORY = "status-history"

    @property
    def is_instant(self) -> bool:
        """Whether the panel shows the newest values alone."""
        return self in (PanelKind.STAT, PanelKind.BAR_GAUGE, PanelKind.TABLE)


class Level(Enum):
    """Meaning of a colour, the same on every board."""

    GOOD = "green"
    INFO = "blue"
    WARNING = "orange"
    CRITICAL = "red"
    NEUTRAL = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """One PromQL expression, whose placeholders `selectors.expand` replaces."""

    expr: str
    legend: str = ""
    """Legend in Grafana's `{{label}}` form; empty for tables."""
    exemplars: bool = False
    """Whether to show the steps behind a histogram's samples."""
    buckets: bool = False
    """Whether the series are the buckets of a histogram, for a heatmap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """Value from which on the panel has the level's colour."""

    value: float
    level: Level
    alert: str | None = None
    """Alert that fires at this value, without the prefix ZeroTrain.

    Its expression must contain the number.
    """


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
    """Label of the series, or `Value #A` for the value of query A."""
    title: str
    unit: Unit | None = None
    thresholds: tuple[Threshold, ...] = ()
    board: str | None = None
    """Board that a click opens for the row's job."""
    hidden: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One panel. Its position on the grid follows from the order, `width` and `height`."""

    title: str
    description: str
    kind: PanelKind = PanelKind.TIME_SERIES
    queries: tuple[Query, ...] = ()
    unit: Unit = Unit.NUMBER
    width: int = 8
    """Width in columns of the grid, which has 24."""
    height: int = 8
    base: Level = Level.GOOD
    """Level below the first threshold."""
    thresholds: tuple[Threshold, ...] = ()
    states: tuple[State, ...] = ()
    columns: tuple[Column, ...] = ()
    """Columns of a table, in order; labels that are not named are hidden."""
    alerts: tuple[str, ...] = ()
    """Alerts that this panel explains; each becomes a link to its runbook."""
    minimum: float | None = None
    maximum: float | None = None
    stacked: bool = False
    logarithmic: bool = False
    no_value: str | None = None
    """Text for a query without series, if that is a good sign."""
    series_levels: tuple[tuple[str, Level], ...] = ()
    """Fixed colours of series, by legend, if a name has a meaning (Failed is red everywhere)."""
    shows_name: bool = False
    """Whether a stat shows the series' name (such as a phase) instead of its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


class Scope(Enum):
    """Scope of a board, which determines its variables and therefore what its links carry."""

    JOB = "job"
    """One job: datasource, namespace, job and ranks."""
    FLEET = "fleet"
    """All jobs of some namespaces."""
    OPERATOR = "operator"
    """The operator, in any namespace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dashboard:
    """One dashboard, stored as one file."""

    name: str
    """Name of the file; with a prefix it is the uid that links use."""
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
    """Return the uid of the board of that name. It never changes, because links and bookmarks contain it."""
    return f"zerotrain-{name}"
