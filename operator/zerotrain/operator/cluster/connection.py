"""Address, identity and clock of the API server: the first two are read by the `kubernetes` library and used
through one aiohttp session, the third comes from the Date header of the answers.

The library's typed models cost two thirds of the speed of pod creation, so only its configuration and
authentication are used (kubeconfig with exec plugins and OIDC, service-account tokens that rotate).
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import aiohttp
from kubernetes.aio import client, config

MAX_CONNECTIONS = 512
"""Maximum of connections: creations, requests of passes, and watches. Where creations hang, each namespace
holds at most as many as it may have in flight (`creations.AT_ONCE`)."""

DATE_TOLERANCE_S = 2.0
"""Difference below which Date says nothing about our clock: it has whole seconds and is as old as the
answer's transit."""

READ_DATE_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Connection:
    """One API server, one identity."""

    configuration: client.Configuration
    in_cluster: bool

    @property
    def server(self) -> str:
        return str(self.configuration.host).rstrip("/")

    @property
    def ca_path(self) -> str | None:
        return self.configuration.ssl_ca_cert

    async def token(self) -> str | None:
        """Return the bearer token without its scheme; the library reads a rotated one again."""
        value = await self.configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return value.split(" ", 1)[-1].strip() if value else None

    async def headers(self) -> dict[str, str]:
        token = await self.token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def session(self, limit: int = MAX_CONNECTIONS) -> aiohttp.ClientSession:
        """Return a new session with at most `limit` connections; the caller closes it."""
        connector = aiohttp.TCPConnector(limit=limit, ssl=self._ssl(), keepalive_timeout=60)
        # The API server sets no cookies, and aiohttp would search its cookie jar at every request.
        return aiohttp.ClientSession(
            connector=connector, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        )

    def _ssl(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.configuration.ssl_ca_cert)
        # Python 3.13 requires extensions of CA certificates that self-made ones of older clusters lack.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not self.configuration.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.configuration.cert_file:
            context.load_cert_chain(self.configuration.cert_file, self.configuration.key_file)
        return context


async def connect(kubeconfig: Path | None = None) -> Connection:
    """Connect by the given kubeconfig, else $KUBECONFIG, else the service account, else ~/.kube/config.

    Raises kubernetes.config.ConfigException when none of them can be used.
    """
    configuration = client.Configuration()
    asked = str(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG")
    if not asked and os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        return Connection(configuration=configuration, in_cluster=True)
    await config.load_kube_config(  # type: ignore[no-untyped-call]
        config_file=asked or None, client_configuration=configuration, persist_config=False
    )
    return Connection(configuration=configuration, in_cluster=False)


def _wall() -> datetime:
    return datetime.now(UTC)


class ServerTime:
    """Clock of the API server: one clock for the operator, whatever its machine says.

    Every time that a pass compares with "now" was stamped by the API server (deletions) or by a replica of
    the operator on another machine (status). A replica with a wrong clock would force the deletion of pods
    that are still ending, or wait an hour for a hold-off. `Api` reports the Date headers, and all code that
    needs the time reads it here. Between them it runs by the monotonic clock, so that a correction of the
    machine's clock does not move it.
    """

    def __init__(
        self, *, wall: Callable[[], datetime] = _wall, ticks: Callable[[], float] = time.monotonic
    ) -> None:
        self._ticks = ticks
        self._base, self._base_at = wall(), ticks()
        self._read_at: float | None = None

    def now(self) -> datetime:
        """Return the present time in UTC."""
        return self._base + timedelta(seconds=self._ticks() - self._base_at)

    def record_date(self, date: str | None) -> None:
        """Take the Date header of an answer that has just arrived."""
        ticks = self._ticks()
        if date is None or (self._read_at is not None and ticks - self._read_at < READ_DATE_EVERY_S):
            return
        self._read_at = ticks
        try:
            server_time = parsedate_to_datetime(date)
        except ValueError:
            return  # a proxy wrote it
        if server_time.tzinfo is None:
            return
        if abs((server_time - self.now()).total_seconds()) > DATE_TOLERANCE_S:
            self._base, self._base_at = server_time.astimezone(UTC), ticks
