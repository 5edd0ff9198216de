"""What can go wrong between here and a job in a cluster: one class per way out.

Raised by `client.cluster` and its neighbours. The command line prints message and `next_step` and ends with
`exit_code`; programs catch the class they can do something about.
"""

from __future__ import annotations

from typing import ClassVar

from zerotrain.client.exit_codes import CommandExit


class ClientError(Exception):
    """The cluster did not do what it was asked to."""

    exit_code: ClassVar[CommandExit] = CommandExit.SERVER_ERROR

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        """`next_step` is a command to type or a thing to correct."""
        super().__init__(message)
        self.next_step = next_step


class KubeconfigError(ClientError):
    """No kubeconfig, a broken one, or no such context."""

    exit_code = CommandExit.NO_KUBECONFIG


class UnreachableError(ClientError):
    """Nobody answers at the API server's address."""

    exit_code = CommandExit.UNREACHABLE


class CertificateError(UnreachableError):
    """The API server's certificate is not one that the kubeconfig trusts, or it has expired."""


class UnauthenticatedError(ClientError):
    """Token or client certificate are wrong or have expired."""

    exit_code = CommandExit.UNAUTHENTICATED


class ForbiddenError(ClientError):
    """The identity is known and may not do this."""

    exit_code = CommandExit.FORBIDDEN


class NotFoundError(ClientError):
    """There is no such object."""

    exit_code = CommandExit.NOT_FOUND


class JobNotFoundError(NotFoundError):
    """There is no such job in the namespace."""


class NoLogsError(NotFoundError):
    """No pod of the attempt is left and no lines of it were kept."""


class NotInstalledError(ClientError):
    """The cluster does not serve ZeroTrainingJobs."""

    exit_code = CommandExit.NOT_INSTALLED


class InvalidJobError(ClientError):
    """The API server refuses the object or the edit; the message has every field."""

    exit_code = CommandExit.INVALID


class ConflictError(ClientError):
    """The object exists already, or has changed meanwhile."""

    exit_code = CommandExit.CONFLICT


class WaitTimeoutError(ClientError):
    """What was waited for did not come in time."""

    exit_code = CommandExit.TIMED_OUT


class JobFailedError(ClientError):
    """The job ended otherwise than waited for."""

    exit_code = CommandExit.JOB_FAILED


class ServerError(ClientError):
    """5xx or too many requests."""


class ExpiredError(ServerError):
    """410: the version to go on from is older than what the API server remembers."""


class TooManyLogsError(ClientError):
    """More logs would have to be followed at once than the limit allows."""

    exit_code = CommandExit.USAGE


class WorkerError(ClientError):
    """No worker of the job answers through the API server."""
