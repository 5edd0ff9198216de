"""Use of kopf as the process: arguments, logs, signals, the order of start-up and clean-up, and an exit with
an error when a start-up fails. kopf watches, decides and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kopf
from kopf.cli import main as kopf_command

from zerotrain.operator.cluster.connection import Connection, connect
from zerotrain.operator.controller.config import OperatorConfig
from zerotrain.operator.controller.manager import Manager


def run() -> None:
    """Run the operator in this process until SIGTERM. The namespaces come from the environment: kopf watches
    none."""
    register()
    kopf_command(["run", "--all-namespaces"])


class EndlessBackoff:
    """Pauses of 1, 2, 4 and 8 seconds, then of 15 seconds without end. kopf reads the API server's discovery
    when it starts, and that server may be in an upgrade."""

    def __iter__(self) -> Iterator[float]:
        pause = 1.0
        while True:
            yield pause
            pause = min(pause * 2, 15.0)


def configure(settings: kopf.OperatorSettings) -> None:
    """Apply kopf's settings for production: bounded waits, no watches and no writes."""
    settings.peering.standalone = True
    # Watching all CRDs and namespaces would need permissions that the operator has no use for.
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.enforce_retry_after = True
    settings.networking.error_backoffs = EndlessBackoff()
    settings.process.ultimate_exiting_timeout = 20


def register(registry: kopf.OperatorRegistry | None = None) -> None:
    """Attach the handlers to kopf's registry (its default one unless given)."""

    # Permanent: an operator that cannot start must exit and be restarted, not stay half initialised.
    @kopf.on.startup(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    async def start(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
        configure(settings)
        memo.runtime = Manager(OperatorConfig.from_env(), await connect())
        await memo.runtime.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(memo: Any, **_: Any) -> None:
        if "runtime" in memo:  # a start-up that failed before the runtime existed is cleaned up, too
            await memo.runtime.stop()

    @kopf.on.login(registry=registry, retries=3)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await credentials(await connect())


async def credentials(connection: Connection) -> kopf.ConnectionInfo:
    """Return the operator's connection in kopf's format."""
    configuration = connection.configuration
    return kopf.ConnectionInfo(
        server=connection.server,
        ca_path=connection.ca_path,
        insecure=not configuration.verify_ssl,
        token=await connection.token(),
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
