"""Translation of failed requests into classes of `errors`, with advice on what to do next."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from zerotrain.client.errors import (
    CertificateError,
    ClientError,
    ConflictError,
    ExpiredError,
    ForbiddenError,
    InvalidJobError,
    NotFoundError,
    NotInstalledError,
    ServerError,
    UnauthenticatedError,
    UnreachableError,
)
from zerotrain.client.kubeconfig import Server
from zerotrain.client.lenient_json import Fields
from zerotrain.contract.strict_json import strict_json
from zerotrain.contract.text import one_line

MAX_MESSAGE_CHARS = 2000


def lost_connection(error: Exception, server: Server) -> ClientError:
    """Return the error for a request that got no answer."""
    causes = list(_causes(error))
    message = one_line(str(next(iter(causes[::-1]), error)), 300)
    certificate = next((item for item in causes if isinstance(item, ssl.SSLError)), None)
    if certificate is not None or "certificate" in message.lower():
        return _distrusted(server, one_line(str(certificate or message), 300))
    if any(isinstance(item, TimeoutError) for item in causes) or "timed out" in message.lower():
        return UnreachableError(
            f"{server.url} did not answer in time (context {server.context})",
            next_step="check VPN and network, then try: kubectl get --raw /readyz",
        )
    if any(isinstance(item, socket.gaierror) for item in causes) or "resolve" in message.lower():
        return UnreachableError(
            f"the name of {server.url} cannot be resolved (context {server.context})",
            next_step="check the server of your kubeconfig: kubectl config view --minify",
        )
    return UnreachableError(
        f"the API server {server.url} cannot be reached: {message} (context {server.context})",
        next_step="is the cluster up? kubectl config view --minify shows where it should be; "
        "a development cluster starts with: make cluster-up",
    )


def failed_request(status: int, body: bytes, *, what: str, server: Server) -> ClientError:
    """Return the error for an answer with status 300 or above."""
    text = body.decode(errors="replace")
    answer = _status_object(text)
    message = one_line(answer.text("message") or text, MAX_MESSAGE_CHARS) or f"status {status}"
    match status:
        case 401:
            return _unauthenticated(server, message)
        case 403:
            return _forbidden(message)
        case 404:
            return _missing(answer, message, what, server)
        case 409:
            return _conflict(answer, message, what)
        case 410:
            return ExpiredError(f"{what}: {message}", next_step="try again")
        case 400 | 405 | 406 | 413 | 415 | 422:
            return InvalidJobError(_refusal(answer, message, what), next_step="correct it and try again")
        case 429:
            return ServerError(
                f"{what}: the API server is overloaded: {message}", next_step="try again in a minute"
            )
    return ServerError(
        f"{what}: {server.url} answered {status}: {message}",
        next_step="try again; if it lasts, ask whoever runs the cluster",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over the error and all its causes, `MaxRetryError.reason` included."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        reason = getattr(error, "reason", None)
        nested = reason if isinstance(reason, BaseException) else None
        first = next((item for item in error.args if isinstance(item, BaseException)), None)
        error = nested or error.__cause__ or first or error.__context__


def _distrusted(server: Server, message: str) -> CertificateError:
    if "expired" in message:
        step = "the server's certificate has to be renewed; or is the clock of this machine wrong?"
    elif "hostname" in message.lower() or "ip address mismatch" in message.lower():
        step = "the certificate is for another name: correct server or tls-server-name in the kubeconfig"
    else:
        step = "the kubeconfig trusts another authority: fetch a new one, or correct certificate-authority"
    return CertificateError(
        f"the certificate of {server.url} is not trusted: {message} (context {server.context})",
        next_step=step,
    )


def _unauthenticated(server: Server, message: str) -> UnauthenticatedError:
    expired = _expired_at(server.configuration.cert_file)
    if expired is not None:
        return UnauthenticatedError(
            f"your client certificate for {server.url} expired at {expired:%Y-%m-%d %H:%M} UTC",
            next_step="fetch a new kubeconfig from whoever runs the cluster",
        )
    return UnauthenticatedError(
        f"{server.url} does not know who you are: {message} (context {server.context})",
        next_step="log in again (the token may have expired), or choose another --context",
    )


def _expired_at(file: str | None) -> datetime | None:
    """Return the end of the certificate in the file; None if it is still valid or cannot be read here."""
    try:
        from cryptography import x509

        end = x509.load_pem_x509_certificate(Path(file or "").read_bytes()).not_valid_after_utc
    except (ImportError, OSError, ValueError):
        return None
    return end if end < datetime.now(UTC) else None


def _forbidden(message: str) -> ForbiddenError:
    if " cannot " in message:
        step = (
            "ask for the ClusterRole zerotrain-editor in the namespace (to look, zerotrain-viewer); "
            "kubectl auth can-i --list shows what you may do"
        )
    else:
        step = "a quota or a policy of the cluster rejects it; the message quotes the reason"
    return ForbiddenError(message, next_step=step)


def _missing(answer: Fields, message: str, what: str, server: Server) -> ClientError:
    if not answer or "could not find the requested resource" in message:
        return NotInstalledError(
            f"the cluster of context {server.context} does not know ZeroTrainingJobs: "
            "zerotrain is not installed there",
            next_step="install the chart (docs/install.md), or choose another --context",
        )
    if answer.part("details").text("kind") == "namespaces":
        name = answer.part("details").text("name")
        return NotFoundError(f"there is no namespace {name}", next_step=f"kubectl create namespace {name}")
    return NotFoundError(f"{what} does not exist: {message}")


def _conflict(answer: Fields, message: str, what: str) -> ConflictError:
    if answer.text("reason") == "AlreadyExists":
        return ConflictError(f"{what} exists already")
    return ConflictError(f"{what} cannot be changed: {message}", next_step="look at it and try again")


def _refusal(answer: Fields, message: str, what: str) -> str:
    """Return every field that the API server names, one a line."""
    causes = answer.part("details").parts("causes")
    lines = [
        f"  {cause.text('field')}: {one_line(cause.text('message'), MAX_MESSAGE_CHARS)}"
        for cause in causes
        if cause.text("field")
    ]
    if not lines:
        return f"{what} is refused: {message}"
    return "\n".join([f"{what} is refused by the API server:", *dict.fromkeys(lines)])


def _status_object(text: str) -> Fields:
    try:
        found = strict_json(text)
    except ValueError:
        return Fields(None)
    return Fields(found) if Fields(found).text("kind") == "Status" else Fields(None)
