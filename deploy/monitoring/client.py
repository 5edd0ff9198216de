"""The required calls of Prometheus' and Alertmanager's HTTP API, without another package."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

TIMEOUT_S = 30.0


class QueryError(RuntimeError):
    """Prometheus rejected a query or does not answer."""


class PrometheusClient:
    """Client of one server."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def instant(self, expr: str, at: float | None = None) -> list[Any]:
        """Return the series with one value each. Raises QueryError."""
        found = self._get("/api/v1/query", query=expr, **({} if at is None else {"time": at}))
        return list(found["data"]["result"])

    def over(self, expr: str, *, start: float, end: float, step_s: float) -> list[Any]:
        """Return the series with their values over a range. Raises QueryError."""
        found = self._get("/api/v1/query_range", query=expr, start=start, end=end, step=step_s)
        return list(found["data"]["result"])

    def targets(self) -> list[Any]:
        """Return the targets that are scraped now."""
        return list(self._get("/api/v1/targets", state="active")["data"]["activeTargets"])

    def is_ready(self) -> bool:
        return is_ready(f"{self.url}/-/ready")

    def _get(self, path: str, **parameters: Any) -> Any:
        try:
            with urlopen(f"{self.url}{path}?{urlencode(parameters)}", timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise QueryError(error.read().decode(errors="replace")) from error
        except (URLError, TimeoutError) as error:
            raise QueryError(f"{self.url} does not answer: {error}") from error


def firing(alertmanager: str) -> list[Any]:
    """Return the alerts that Alertmanager holds. Raises OSError if it does not answer."""
    with urlopen(f"{alertmanager}/api/v2/alerts", timeout=TIMEOUT_S) as answer:
        return list(json.load(answer))


def is_ready(url: str) -> bool:
    """Return whether the address answers 200."""
    try:
        with urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, URLError):
        return False
