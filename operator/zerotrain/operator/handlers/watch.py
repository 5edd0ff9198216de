"""What kopf does for us: watch our one kind and hand every event over. It decides and writes nothing.

No kopf finalizer, daemon, timer or index, and no handler with state: `on.event` keeps no annotation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import kopf

from zerotrain.operator.cluster.connection import Connection, connect
from zerotrain.operator.constants import GROUP, PLURAL, VERSION
from zerotrain.operator.handlers.config import OperatorConfig
from zerotrain.operator.handlers.runtime import Runtime


class EndlessBackoff:
    """1, 2, 4, 8, 15 seconds, then 15 for ever: a watch that gave up would come back only with a restart."""

    def __iter__(self) -> Iterator[float]:
        pause = 1.0
        while True:
            yield pause
            pause = min(pause * 2, 15.0)


class _RefusalsOnce(logging.Filter):
    """kopf asks again for ever where it is refused, which is what we want, and says so every time. The first
    refusal of each namespace is news; our own watch of its pods tells when it is over."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "APIForbiddenError" not in text or text.startswith("Request attempt #1 ")


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf keeps what it last handled to find differences. Nobody asks for those here, and a copy of every
    job at every event would be a tenth of the operator's work."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> Any:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Nothing: no annotation, no write."""


class _NoProgress(kopf.ProgressStorage):
    """The same for the state of handlers: ours have none."""

    def fetch(self, *, key: Any, body: Any) -> Any:
        return None

    def store(self, *, key: Any, record: Any, body: Any, patch: Any) -> None:
        """Nothing."""

    def purge(self, *, key: Any, body: Any, patch: Any) -> None:
        """Nothing."""

    def touch(self, *, body: Any, patch: Any, value: Any) -> None:
        """Nothing."""

    def clear(self, *, essence: Any) -> Any:
        return essence


def configure(settings: kopf.OperatorSettings) -> None:
    """kopf's settings for production: bounded waits, no watches and no writes that we do not need."""
    settings.peering.standalone = True
    # The CRD is there before the operator is; watching all CRDs would need a permission for nothing.
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 360
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.enforce_retry_after = True
    settings.networking.error_backoffs = EndlessBackoff()
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.persistence.progress_storage = _NoProgress()
    settings.queueing.worker_limit = 100
    settings.queueing.idle_timeout = 1.0
    settings.process.ultimate_exiting_timeout = 20


def register(registry: kopf.OperatorRegistry | None = None) -> None:
    """Attach the handlers to kopf's registry (the default one for `kopf run -m`)."""

    # Permanent: an operator that cannot start must end and be restarted, not sit there half made.
    @kopf.on.startup(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    async def start(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
        configure(settings)
        # kopf logs every handled event at INFO: ours are every status write of every job.
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)
        logging.getLogger("kopf._cogs.clients.watching").addFilter(_RefusalsOnce())
        memo.runtime = Runtime(OperatorConfig.from_env(), await connect())
        await memo.runtime.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(memo: Any, **_: Any) -> None:
        if "runtime" in memo:  # a start-up that failed before it got there is cleaned up, too
            await memo.runtime.stop()

    @kopf.on.login(registry=registry, retries=3)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await credentials(await connect())

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_event(event: Any, memo: Any, **_: Any) -> None:
        controller = memo.runtime.controller
        job = dict(event["object"])
        job["metadata"] = dict(job["metadata"])
        if event["type"] == "DELETED":
            controller.job_deleted(job)
        else:
            controller.job_changed(job)


async def credentials(connection: Connection) -> kopf.ConnectionInfo:
    """Our connection in kopf's words."""
    configuration = connection.configuration
    return kopf.ConnectionInfo(
        server=connection.server,
        ca_path=connection.ca_path,
        insecure=not configuration.verify_ssl,
        token=await connection.token(),
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
