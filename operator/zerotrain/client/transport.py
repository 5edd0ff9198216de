"""Requests to the API server in plain JSON, and its lists, over the connection of the `kubernetes` package.

Used by `cluster.Client` alone. Every failure becomes one of the classes of `errors`, with what to do next.
The package's typed models are not used: they reject objects that are newer than themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zerotrain.client.error_mapping import failed_request, lost_connection
from zerotrain.client.errors import ClientError
from zerotrain.client.kubeconfig import Server, kubernetes_package
from zerotrain.client.lenient_json import Fields, read_item, read_object
from zerotrain.contract.json_text import ItemSplitter, read_json

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
PAGE = 500
MAX_ANSWER_BYTES = 256 << 20
MERGE_PATCH = "application/merge-patch+json"
JSON = "application/json"


class Transport:
    """Client for requests to one API server. Safe to use from several threads."""

    def __init__(self, server: Server) -> None:
        client, _ = kubernetes_package()
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
        return self._json("GET", path, query, None, what)

    def post(
        self, path: str, body: Mapping[str, Any], query: Mapping[str, str] | None = None, *, what: str
    ) -> dict[str, Any]:
        return self._json("POST", path, query, body, what)

    def put(
        self, path: str, body: Mapping[str, Any], query: Mapping[str, str] | None = None, *, what: str
    ) -> dict[str, Any]:
        return self._json("PUT", path, query, body, what)

    def patch(
        self, path: str, body: Mapping[str, Any], query: Mapping[str, str] | None = None, *, what: str
    ) -> dict[str, Any]:
        """Apply a JSON merge patch (RFC 7386)."""
        return self._json("PATCH", path, query, body, what)

    def delete(self, path: str, body: Mapping[str, Any], *, what: str) -> dict[str, Any]:
        return self._json("DELETE", path, None, body, what)

    def read(self, path: str, *, what: str, limit: int) -> bytes:
        """Return the body at a path, of any type and of at most `limit` bytes."""
        with self._answer("GET", path, None, None, what, READ_TIMEOUT_S) as answer:
            return _limited(answer, limit, what, self.server)

    @contextmanager
    def stream(
        self, path: str, query: Mapping[str, str], *, what: str, timeout_s: float | None
    ) -> Iterator[Iterator[bytes]]:
        """Yield the chunks of an answer as they arrive, for followed logs and watches."""
        with self._answer("GET", path, query, None, what, timeout_s) as answer:
            yield _chunks(answer, self.server)

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        what: str,
    ) -> dict[str, Any]:
        with self._answer(method, path, query, body, what, READ_TIMEOUT_S) as answer:
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
        what: str,
        timeout_s: float | None,
    ) -> Iterator[Any]:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        headers = {"Accept": f"{JSON}, */*"}
        if body is not None:
            headers["Content-Type"] = MERGE_PATCH if method == "PATCH" else JSON
        try:
            request = self._api.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params=headers,
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
    text = bytearray()
    for chunk in _chunks(answer, server):
        text += chunk
        if len(text) > limit:
            raise ClientError(f"{what}: the answer is longer than {limit} bytes")
    return bytes(text)


def _chunks(answer: Any, server: Server) -> Iterator[bytes]:
    from urllib3.exceptions import HTTPError

    try:
        yield from answer.stream(1 << 16, decode_content=True)
    except HTTPError as error:
        raise lost_connection(error, server) from error


class Listing:
    """All items of a list, to be iterated over once. Raises ClientError."""

    def __init__(self, transport: Transport, path: str, query: Mapping[str, str], *, what: str) -> None:
        self._transport, self._path, self._query, self._what = transport, path, dict(query), what
        self.version = ""
        """Resource version of the list, once all items have been read."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        token = ""
        while True:
            page = {**self._query, "limit": str(PAGE), **({"continue": token} if token else {})}
            splitter = ItemSplitter()
            try:
                yield from map(read_item, self._texts(splitter, page))
                meta = Fields(read_json(splitter.envelope)).part("metadata")
            except ValueError as error:
                url = self._transport.server.url
                raise ClientError(
                    f"{self._what}: {url} sent an answer that is not from Kubernetes",
                    next_step="check the server of your kubeconfig: is there a proxy in front of it?",
                ) from error
            token, self.version = meta.text("continue"), meta.text("resourceVersion")
            if not token:
                return

    def _texts(self, splitter: ItemSplitter, page: Mapping[str, str]) -> Iterator[bytes]:
        with self._transport.stream(self._path, page, what=self._what, timeout_s=READ_TIMEOUT_S) as chunks:
            for chunk in chunks:
                yield from splitter.feed(chunk)
        yield from splitter.finish()
