"""One panel as Grafana's JSON, without its position on the grid."""

from __future__ import annotations

import string
from typing import Any, TypeAlias

from deploy.dashboards.links import JOB_BOARD_URL, runbook_url
from deploy.dashboards.model import Column, Level, Panel, PanelKind, Query, State, Threshold, Unit, uid
from deploy.dashboards.selectors import expand

Json: TypeAlias = dict[str, Any]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
_LEGEND = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]}
_PLAIN_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
_LAST = {"values": False, "calcs": ["lastNotNull"], "fields": ""}


def panel_json(panel: Panel) -> Json:
    """Return the whole panel except for `id` and `gridPos`."""
    return {
        "type": panel.kind.value,
        "title": panel.title,
        "description": " ".join(panel.description.split()),
        "links": [_runbook_link(alert) for alert in panel.alerts],
        "datasource": DATASOURCE,
        "targets": [
            _target(panel.kind, query, ref)
            for query, ref in zip(panel.queries, string.ascii_uppercase, strict=False)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _options(panel),
        "transformations": _transformations(panel),
    }


def _runbook_link(alert: str) -> Json:
    return {
        "title": f"Runbook: ZeroTrain{alert}",
        "url": runbook_url(alert),
        "type": "link",
        "icon": "doc",
        "tooltip": f"What the alert ZeroTrain{alert} means and what to do",
        "tags": [],
        "asDropdown": False,
        "targetBlank": True,
        "includeVars": False,
        "keepTime": False,
    }


def _target(kind: PanelKind, query: Query, ref: str) -> Json:
    return {
        "refId": ref,
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": expand(query.expr),
        "legendFormat": query.legend or "__auto",
        "instant": kind.is_instant,
        "range": not kind.is_instant,
        "exemplar": query.exemplars,
        "format": "table" if kind is PanelKind.TABLE else "heatmap" if query.buckets else "time_series",
    }


def _defaults(panel: Panel) -> Json:
    found: Json = {
        "unit": panel.unit.value,
        "color": {"mode": "palette-classic" if panel.kind is PanelKind.TIME_SERIES else "thresholds"},
        "thresholds": _thresholds(panel.base, panel.thresholds),
        "mappings": _mappings(panel.states),
        "custom": _custom(panel),
    }
    optional: Json = {"min": panel.minimum, "max": panel.maximum, "noValue": panel.no_value}
    return found | {key: value for key, value in optional.items() if value is not None}


def _thresholds(base: Level, thresholds: tuple[Threshold, ...]) -> Json:
    steps: list[Json] = [{"color": base.value, "value": None}]
    steps += [{"color": item.level.value, "value": item.value} for item in thresholds]
    return {"mode": "absolute", "steps": steps}


def _mappings(states: tuple[State, ...]) -> list[Json]:
    if not states:
        return []
    options = {
        f"{state.value:g}": {"text": state.text, "color": state.level.value, "index": index}
        for index, state in enumerate(states)
    }
    return [{"type": "value", "options": options}]


def _custom(panel: Panel) -> Json:
    match panel.kind:
        case PanelKind.TIME_SERIES:
            return {
                "drawStyle": "line",
                "lineInterpolation": "linear",
                "lineWidth": 1,
                "fillOpacity": 40 if panel.stacked else 8,
                "showPoints": "never",
                "spanNulls": False,
                "axisPlacement": "auto",
                "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
                "scaleDistribution": {"type": "log", "log": 10} if panel.logarithmic else {"type": "linear"},
            }
        case PanelKind.TABLE:
            return {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True, "inspect": False}
        case PanelKind.STATE_TIMELINE:
            return {"lineWidth": 0, "fillOpacity": 80}
        case PanelKind.STATUS_HISTORY:
            return {"lineWidth": 1, "fillOpacity": 80}
        case PanelKind.HEATMAP:
            return {"scaleDistribution": {"type": "linear"}}
        case _:
            return {}


def _options(panel: Panel) -> Json:
    match panel.kind:
        case PanelKind.TIME_SERIES:
            return {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}}
        case PanelKind.STAT:
            return {
                "reduceOptions": _LAST,
                "orientation": "auto",
                "textMode": "name" if panel.shows_name else "auto",
                "wideLayout": True,
                "colorMode": "background"
                if panel.states or panel.thresholds or panel.series_levels
                else "value",
                "graphMode": "none",
                "justifyMode": "auto",
                "showPercentChange": False,
                "percentChangeColorMode": "standard",
            }
        case PanelKind.BAR_GAUGE:
            return _bar_gauge()
        case PanelKind.TABLE:
            return {"showHeader": True, "cellHeight": "sm"}
        case PanelKind.HEATMAP:
            return _heatmap(panel)
        case PanelKind.STATE_TIMELINE:
            return {
                "mergeValues": True,
                "alignValue": "left",
                "rowHeight": 0.9,
                "showValue": "auto",
                "legend": _PLAIN_LEGEND,
                "tooltip": {"mode": "single", "sort": "none"},
            }
        case _:
            return {
                "rowHeight": 0.9,
                "colWidth": 0.95,
                "showValue": "never",
                "legend": _PLAIN_LEGEND,
                "tooltip": {"mode": "single", "sort": "none"},
            }


def _bar_gauge() -> Json:
    return {
        "reduceOptions": _LAST,
        "orientation": "horizontal",
        "displayMode": "gradient",
        "valueMode": "color",
        "namePlacement": "auto",
        "showUnfilled": True,
        "sizing": "auto",
        "minVizWidth": 8,
        "minVizHeight": 16,
        "maxVizHeight": 300,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
    }


def _heatmap(panel: Panel) -> Json:
    """Return the options of a heatmap.

    Its rows are ranks or, with `buckets`, the bounds of a histogram. Empty cells stay dark.
    """
    is_histogram = any(query.buckets for query in panel.queries)
    return {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": Unit.PER_SECOND.value if is_histogram else panel.unit.value},
        "color": {
            "mode": "scheme",
            "scheme": "Turbo",
            "fill": "dark-orange",
            "scale": "exponential",
            "exponent": 0.5,
            "steps": 64,
            "reverse": False,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": is_histogram, "showColorScale": True},
        "yAxis": {
            "axisPlacement": "left",
            "unit": panel.unit.value if is_histogram else Unit.NUMBER.value,
            "reverse": False,
        },
    }


def _overrides(panel: Panel) -> list[Json]:
    columns = [
        {"matcher": {"id": "byName", "options": column.title}, "properties": _column(column)}
        for column in panel.columns
        if not column.hidden
    ]
    series = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": level.value}}],
        }
        for name, level in panel.series_levels
    ]
    return columns + series


def _column(column: Column) -> list[Json]:
    found: list[Json] = []
    if column.unit is not None:
        found.append({"id": "unit", "value": column.unit.value})
    if column.thresholds:
        found.append({"id": "thresholds", "value": _thresholds(Level.GOOD, column.thresholds)})
        found.append({"id": "custom.cellOptions", "value": {"type": "color-text"}})
    if column.board is not None:
        link = {"title": "Open this job", "url": JOB_BOARD_URL.format(uid=uid(column.board))}
        found.append({"id": "links", "value": [link]})
    return found


def _transformations(panel: Panel) -> list[Json]:
    """Return the transformations of a table.

    The table has one row per set of labels, and only the named columns in the order of the description.
    """
    if panel.kind is not PanelKind.TABLE:
        return []
    labels = [column.label for column in panel.columns]
    merge = [{"id": "merge", "options": {}}] if len(panel.queries) > 1 else []
    return [
        *merge,
        {"id": "filterFieldsByName", "options": {"include": {"names": labels}}},
        {
            "id": "organize",
            "options": {
                "indexByName": {label: index for index, label in enumerate(labels)},
                "renameByName": {column.label: column.title for column in panel.columns},
                "excludeByName": {column.label: True for column in panel.columns if column.hidden},
            },
        },
    ]
