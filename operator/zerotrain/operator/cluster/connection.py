"""Address of the API server and identity of the operator, read by the `kubernetes` library and used through
one aiohttp session.

The library's typed models cost two thirds of the speed of pod creation, so only its configuration and
authentication are used (kubeconfig with exec plugins and OIDC, service-account tokens that rotate).
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from kubernetes.aio import client, config

MAX_CONNECTIONS = 512
"""Maximum of connections: creations, requests of passes, and watches. Where creations hang, each namespace
holds at most as many as it may have in flight (`creations.AT_ONCE`)."""


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
