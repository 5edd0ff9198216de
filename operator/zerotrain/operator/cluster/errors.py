"""Errors of requests to the API server. The type says whether the request is retried.

ApiError
    NotFound            404: the object is gone
    Conflict            409 on an update: another client wrote first
    AlreadyExists       409 on a creation
    Gone                410: the version is too old, list again
    Forbidden           403: missing permission, quota or admission; retrying at once cannot help
    Unprocessable       400, 422: the API server does not accept the object
    Unavailable         429, 5xx or no connection, after all retries
    NotLeading          not sent: another replica may lead by now
"""

from __future__ import annotations

from typing import Any

from zerotrain.contract.text import one_line
from zerotrain.operator.cluster import json_codec


class ApiError(Exception):
    """Error answer of the API server; `status` is 0 if it did not answer."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        # The server quotes the request, and a proxy that answers in its place may send anything.
        super().__init__(one_line(message))
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Return whether a retry cannot help until the user or an administrator changes something. A 500
        after all retries usually comes from an admission webhook that is down; 429 and 503 concern the server
        itself."""
        return self.status in (400, 403, 422) or (self.status >= 500 and self.status != 503)


class NotFound(ApiError):
    pass


class Conflict(ApiError):
    pass


class AlreadyExists(ApiError):
    pass


class Gone(ApiError):
    pass


class Forbidden(ApiError):
    pass


class Unprocessable(ApiError):
    pass


class Unavailable(ApiError):
    retry_after_s: float | None = None
    """Seconds of the answer's Retry-After header."""


class NotLeading(ApiError):
    pass


_BY_STATUS: dict[int, type[ApiError]] = {
    400: Unprocessable,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Unprocessable,
    429: Unavailable,
}


def error_of(request: str, status: int, body: bytes) -> ApiError:
    """Return the typed error for an answer that is not 2xx; `request` is `VERB path`."""
    content = _status_object(body)
    message = str(content.get("message", "")) or body[:200].decode(errors="replace")
    kind = AlreadyExists if content.get("reason") == "AlreadyExists" else _BY_STATUS.get(status, ApiError)
    if status >= 500:
        kind = Unavailable
    return kind(f"{request}: {status} {message}", status=status)


def _status_object(body: bytes) -> dict[str, Any]:
    # A proxy or load balancer in between may answer with HTML or nothing at all.
    try:
        parsed = json_codec.read(body)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
