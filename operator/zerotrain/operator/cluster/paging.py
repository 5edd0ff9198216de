"""Lists of the API server, item by item: it bounds a page by the number of items, never by their size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from zerotrain.contract.json_text import ItemSplitter
from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.api import Api, Json, Request

FIRST_PAGE = 100
MOST = 500
"""Maximum of items on a page."""
PAGE_BYTES = 4 << 20
"""Approximate size of a page that is requested from the API server."""


class Listing:
    """Texts of all items of a list, to be iterated over once. Raises ApiError, ValueError.

    One item is held at a time. The API server holds a page: where items are large, fewer are requested.
    """

    def __init__(self, api: Api, *, path: str, kind: str, params: Mapping[str, str] | None = None) -> None:
        self._api, self._path, self._kind = api, path, kind
        self._params = dict(params or {})
        self.metadata: Json = {}
        """Metadata of the last page, once all items have been read."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        limit, place = FIRST_PAGE, dict[str, str]()
        while True:
            splitter, size = ItemSplitter(), 0
            params = {**self._params, "limit": str(limit), **place}
            request = Request(method="GET", path=self._path, kind=self._kind, params=params)
            async for piece in self._api.stream(request):
                size += len(piece)
                for item in splitter.feed(piece):
                    yield item
                await asyncio.sleep(0)  # reading chunks that have arrived never yields to the loop
            for item in splitter.finish():
                yield item
            self.metadata = dict(json_codec.read(splitter.envelope)).get("metadata") or {}
            more = self.metadata.get("continue")
            if not more:
                return
            place, limit = {"continue": more}, next_limit(limit, size)


def next_limit(limit: int, size: int) -> int:
    """Return the number of items to request next, where the last page had `limit` items and `size` bytes."""
    return max(min(limit * PAGE_BYTES // max(size, 1), limit * 4, MOST), 1)
