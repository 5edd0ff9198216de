"""Errors between a client and a job in a cluster, with one class per remedy.

Raised by `client.cluster` and its neighbours. The command line prints the message and `next_step` and ends
with `exit_code`; programs catch the class that they can handle.
"""

from __future__ import annotations

from typing import ClassVar

from zerotrain.client.command_exits import CommandExit


class ClientError(Exception):
    """Error of a request that the cluster did not carry out."""

    exit_code: ClassVar[CommandExit] = CommandExit.SERVER_ERROR

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        """`next_step` is a command to type or a thing to correct."""
        super().__init__(message)
        self.next_step = next_step


class KubeconfigError(ClientError):
    """Missing or broken kubeconfig, or unknown context."""

    exit_code = CommandExit.NO_KUBECONFIG


class UnreachableError(ClientError):
    """API server that does not answer at its address."""

    exit_code = CommandExit.UNREACHABLE


class CertificateError(UnreachableError):
    """Certificate of the API server that the kubeconfig does not trust, or that has expired."""


class UnauthenticatedError(ClientError):
    """Token or client certificate that is wrong or has expired."""

    exit_code = CommandExit.UNAUTHENTICATED


class ForbiddenError(ClientError):
    """Identity that is known but lacks the permission."""

    exit_code = CommandExit.FORBIDDEN


class NotFoundError(ClientError):
    """Object that does not exist."""

    exit_code = CommandExit.NOT_FOUND


class JobNotFoundError(NotFoundError):
    """Job that does not exist in the namespace."""


class NoLogsError(NotFoundError):
    """Attempt of which no pod is left and no lines were kept."""


class NotInstalledError(ClientError):
    """Cluster that does not serve ZeroTrainingJobs."""

    exit_code = CommandExit.NOT_INSTALLED


class InvalidJobError(ClientError):
    """Object or edit that the API server rejects; the message names every field."""

    exit_code = CommandExit.INVALID


class ConflictError(ClientError):
    """Object that exists already, or has changed meanwhile."""

    exit_code = CommandExit.CONFLICT


class WaitTimeoutError(ClientError):
    """Wait whose condition did not hold in time."""

    exit_code = CommandExit.TIMED_OUT


class JobFailedError(ClientError):
    """Job that ended in another way than waited for."""

    exit_code = CommandExit.JOB_FAILED


class ServerError(ClientError):
    """Answer with status 5xx, or 429 for too many requests."""


class ExpiredError(ServerError):
    """Answer with status 410: the resource version to continue from is older than what the API server
    keeps."""


class TooManyLogsError(ClientError):
    """Request to follow more logs at once than the limit allows."""

    exit_code = CommandExit.USAGE


class WorkerError(ClientError):
    """Job none of whose workers answers through the API server."""
