"""Connection to the API server: kubeconfig and identity by the `kubernetes` package, requests in plain JSON.

Used by `cluster.Client` alone. Every failure becomes one of the classes of `errors`, with what to do next.
The package's typed models are not used: they reject objects that are newer than themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.client.error_mapping import failed_request, lost_connection
from zerotrain.client.errors import ClientError, KubeconfigError
from zerotrain.client.objects import read_object

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 256 << 20
MAX_ANSWER_DEPTH = 200
MERGE_PATCH = "application/merge-patch+json"
JSON = "application/json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """One API server, one identity, and the default namespace of its kubeconfig."""

    configuration: Any
    """Object of type kubernetes.client.Configuration."""
    namespace: str
    context: str
    """Name of the context, for messages; `in-cluster` in a pod."""

    @property
    def url(self) -> str:
        return str(self.configuration.host).rstrip("/")


def find_server(kubeconfig: Path | str | None, context: str | None) -> Server:
    """Find the server by the given kubeconfig, else $KUBECONFIG, else the pod's service account, else
    ~/.kube/config.

    Raises KubeconfigError.
    """
    client, config = _kubernetes()
    configuration = client.Configuration()
    configuration.retries = _retries()
    asked = str(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG")
    if not asked and context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_incluster_config(client_configuration=configuration)
        return Server(configuration=configuration, namespace=_own_namespace(), context="in-cluster")
    if asked and not any(Path(part).expanduser().is_file() for part in asked.split(os.pathsep) if part):
        raise KubeconfigError(
            f"there is no kubeconfig at {asked}", next_step="correct --kubeconfig or KUBECONFIG"
        )
    file = (
        os.pathsep.join(str(Path(part).expanduser()) for part in asked.split(os.pathsep)) if asked else None
    )
    try:
        contexts, active = config.list_kube_config_contexts(config_file=file)
        chosen = _choose(contexts, active, context)
        config.load_kube_config(config_file=file, context=chosen["name"], client_configuration=configuration)
    except ClientError:
        raise
    # The loader passes on any exception of its YAML reader, the file system and plugins.
    except Exception as error:
        raise _unusable(asked, error) from error
    namespace = (chosen.get("context") or {}).get("namespace") or "default"
    return Server(configuration=configuration, namespace=str(namespace), context=str(chosen["name"]))


def _kubernetes() -> tuple[Any, Any]:
    """Import kubernetes.client and kubernetes.config in 0.3 s, and not in 1.6 s with 22 MiB more.

    The package imports all of itself, and its dynamic client also `kubernetes_validate` where that is
    installed, as in the development environment. The package has no switch for it. The module is hidden for
    the import alone: a program that uses the client may need it.
    """
    validator = "kubernetes_validate"
    hide = validator not in sys.modules
    if hide:
        sys.modules[validator] = None  # type: ignore[assignment]
    try:
        from kubernetes import client, config
    finally:
        if hide:
            del sys.modules[validator]
    return client, config


def _retries() -> Any:
    """Return the retry policy: once more if the connection closed during a read; requests that change
    something are sent once."""
    import urllib3

    return urllib3.Retry(total=1, connect=0, read=1, redirect=False, status=0, other=0)


def _own_namespace() -> str:
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text().strip() or "default"
    except OSError:
        return "default"


def _choose(contexts: list[Any], active: Any, wanted: str | None) -> dict[str, Any]:
    if wanted is None:
        return dict(active)
    found = next((item for item in contexts if item["name"] == wanted), None)
    if found is None:
        known = ", ".join(sorted(str(item["name"]) for item in contexts)) or "none"
        raise KubeconfigError(
            f"the kubeconfig has no context {wanted!r}; it has {known}", next_step="choose one of them"
        )
    return dict(found)


def _unusable(asked: str | None, error: Exception) -> KubeconfigError:
    place = asked or "~/.kube/config"
    message = " ".join(str(error).split()) or type(error).__name__
    if asked is None and not Path("~/.kube/config").expanduser().exists():
        return KubeconfigError(
            "there is no kubeconfig: neither KUBECONFIG nor ~/.kube/config names a cluster",
            next_step="export KUBECONFIG=..., or start a cluster here: make cluster-up",
        )
    return KubeconfigError(
        f"the kubeconfig {place} cannot be used: {message}",
        next_step="see kubectl config view, and kubectl config use-context NAME",
    )


class Transport:
    """Client for requests to one API server. Safe to use from several threads."""

    def __init__(self, server: Server) -> None:
        client, _ = _kubernetes()
        self.server = server
        self._api = client.ApiClient(server.configuration)
        self._api.user_agent = "zerotrain-client"

    @property
    def api_client(self) -> Any:
        """The kubernetes.client.ApiClient, for uses of the rest of the package."""
        return self._api

    def close(self) -> None:
        self._api.close()

    def get(self, path: str, query: Mapping[str, str] | None = None, *, what: str) -> dict[str, Any]:
        """Return the JSON object at a path. `what` is its name in errors, such as `job gpt`."""
        return self._json("GET", path, query, None, JSON, what)

    def post(
        self, path: str, body: Mapping[str, Any], query: Mapping[str, str] | None = None, *, what: str
    ) -> dict[str, Any]:
        return self._json("POST", path, query, body, JSON, what)

    def put(
        self, path: str, body: Mapping[str, Any], query: Mapping[str, str] | None = None, *, what: str
    ) -> dict[str, Any]:
        return self._json("PUT", path, query, body, JSON, what)

    def patch(
        self,
        path: str,
        body: Mapping[str, Any],
        query: Mapping[str, str] | None = None,
        *,
        what: str,
        kind: str = MERGE_PATCH,
    ) -> dict[str, Any]:
        return self._json("PATCH", path, query, body, kind, what)

    def delete(self, path: str, body: Mapping[str, Any], *, what: str) -> dict[str, Any]:
        return self._json("DELETE", path, None, body, JSON, what)

    def read(
        self, path: str, query: Mapping[str, str] | None = None, *, what: str, limit: int = MAX_ANSWER_BYTES
    ) -> bytes:
        """Return the body at a path, of any type and of at most `limit` bytes."""
        with self._answer("GET", path, query, None, JSON, what, READ_TIMEOUT_S) as answer:
            return _limited(answer, limit, what, self.server)

    @contextmanager
    def stream(
        self, path: str, query: Mapping[str, str] | None = None, *, what: str, timeout_s: float | None = None
    ) -> Iterator[Iterator[bytes]]:
        """Yield the chunks of an answer as they arrive, for followed logs and watches."""
        with self._answer("GET", path, query, None, JSON, what, timeout_s) as answer:
            yield _chunks(answer, self.server, what)

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        kind: str,
        what: str,
    ) -> dict[str, Any]:
        with self._answer(method, path, query, body, kind, what, READ_TIMEOUT_S) as answer:
            text = _limited(answer, MAX_ANSWER_BYTES, what, self.server)
        try:
            return read_object(text)
        except ValueError as error:
            raise ClientError(
                f"{self.server.url} sent an answer that is not from Kubernetes",
                next_step="check the server of your kubeconfig: is there a proxy in front of it?",
            ) from error

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        kind: str,
        what: str,
        timeout_s: float | None,
    ) -> Iterator[Any]:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            request = self._api.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={
                    "Accept": f"{JSON}, */*",
                    **({"Content-Type": kind} if body is not None else {}),
                },
                body=dict(body) if body is not None else None,
                auth_settings=["BearerToken"],
            )
            answer = self._api.call_api(*request, _request_timeout=(CONNECT_TIMEOUT_S, timeout_s)).response
        except (HTTPError, ApiException, OSError) as error:
            raise lost_connection(error, self.server) from error
        try:
            if answer.status >= 300:
                text = answer.read(1 << 20, decode_content=True)
                raise failed_request(answer.status, text, what=what, server=self.server)
            yield answer
        finally:
            # An unread rest would be read by the next request on this connection.
            answer.close()
            answer.release_conn()


def _limited(answer: Any, limit: int, what: str, server: Server) -> bytes:
    from urllib3.exceptions import HTTPError

    text = bytearray()
    try:
        for chunk in answer.stream(1 << 16, decode_content=True):
            text += chunk
            if len(text) > limit:
                raise ClientError(f"{what}: the answer is longer than {limit} bytes")
    except HTTPError as error:
        raise lost_connection(error, server) from error
    return bytes(text)


def _chunks(answer: Any, server: Server, what: str) -> Iterator[bytes]:
    from urllib3.exceptions import HTTPError

    try:
        yield from answer.stream(1 << 16, decode_content=True)
    except HTTPError as error:
        raise lost_connection(error, server) from error
