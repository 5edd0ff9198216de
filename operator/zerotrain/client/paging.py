"""Lists of the API server, item by item, each within bounds: a stored item that is too large or too deep is
returned with a note that says so, and does not affect the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zerotrain.client.errors import ClientError
from zerotrain.client.lenient_json import Fields
from zerotrain.client.objects import read_item
from zerotrain.client.transport import Transport
from zerotrain.contract.json_text import ItemSplitter, read_json

PAGE = 500
READ_TIMEOUT_S = 30.0


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
