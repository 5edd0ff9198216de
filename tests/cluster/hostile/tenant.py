"""The tenant: an account bound to Kubernetes' `edit` in one namespace, and the requests that it sends."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.cluster.hostile.bodies import COLLECTIONS, Post
from tests.support.devcluster import Cluster, wait_until

ACCOUNT = "mallory"
_NAME = re.compile(rb'"metadata":\s*\{\s*"name":\s*"([^"]+)"')
MERGE = "application/merge-patch+json"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The API server's answer to one request."""

    code: int
    words: str

    @property
    def accepted(self) -> bool:
        return self.code < 300

    def __str__(self) -> str:
        return "accepted" if self.accepted else f"{self.code} {self.words[:90]}"


class Client:
    """Requests of one user. Answers are not parsed, as they contain what was sent, however deep."""

    def __init__(self, cluster: Cluster, token: str) -> None:
        parts = urlsplit(cluster.api_url)
        self._host, self._port = parts.hostname or "", parts.port or 443
        self._tls = ssl.create_default_context(cadata=cluster.ca.decode())
        self._token = token
        self._local = threading.local()

    def send(
        self, method: str, path: str, body: bytes | None = None, content: str = "application/json"
    ) -> Answer:
        """Send a request on the calling thread's own connection, which is kept open."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content}
        # Otherwise the answer repeats all that was sent, or everything that exists.
        shape = "PartialObjectMetadata" if body else "PartialObjectMetadataList"
        headers["Accept"] = f"application/json;as={shape};g=meta.k8s.io;v=v1"
        code, text = self._exchange(method, path, body, headers)
        return Answer(code=code, words=_words(code, text))

    def names(self, path: str) -> list[str]:
        """Return the names of the objects in a collection.

        The answer is not parsed: owners of fields nest as deep as the objects. Raises RuntimeError if the API
        server rejects the request.
        """
        headers = {"Authorization": f"Bearer {self._token}"}
        headers["Accept"] = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
        code, text = self._exchange("GET", path, None, headers)
        if code >= 300:
            raise RuntimeError(f"GET {path}: {code} {_words(code, text)}")
        return [found.decode() for found in _NAME.findall(text)]

    def delete_all(self, path: str) -> bool:
        """Delete all objects of a collection and return whether the API server accepted the request.

        A request counts as not accepted if the server drops its connection, as it does when the deletion of
        many large objects takes over a minute. It can be sent again.
        """
        try:
            return self.send("DELETE", path).accepted
        except (http.client.HTTPException, OSError):
            return False

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        for attempt in (1, 2):
            connection = self._connection()
            try:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                return response.status, response.read()
            except (http.client.HTTPException, OSError):
                self._local.connection = None
                if attempt == 2 or method == "POST":
                    raise
        raise AssertionError("unreachable")

    def _connection(self) -> http.client.HTTPSConnection:
        found: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
        if found is None:
            found = http.client.HTTPSConnection(self._host, self._port, context=self._tls, timeout=120)
            self._local.connection = found
        return found


def _words(code: int, body: bytes) -> str:
    if code < 300:
        return ""
    try:
        return str(json.loads(body).get("message", ""))
    except (ValueError, RecursionError, AttributeError):
        return body[:300].decode(errors="replace")


class Tenant:
    """An account that only posts, changes and deletes objects in its namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.namespace = namespace
        cluster.kubectl("create", "serviceaccount", ACCOUNT, "-n", namespace)
        account = f"--serviceaccount={namespace}:{ACCOUNT}"
        cluster.kubectl("create", "rolebinding", ACCOUNT, "--clusterrole=edit", account, "-n", namespace)
        token = cluster.kubectl("create", "token", ACCOUNT, "-n", namespace, "--duration=2h").stdout.strip()
        self._client = Client(cluster, token)
        # The controller that aggregates roles adds the editor's rules a moment after they exist.
        listed = self.collection("ZeroTrainingJob")
        wait_until(lambda: self._client.send("GET", listed).accepted, "edit to include jobs")

    def collection(self, kind: str) -> str:
        return COLLECTIONS[kind].format(self.namespace)

    def create(self, post: Post) -> Answer:
        path = self.collection(post.kind)
        return self._client.send("POST", path, post.body(self.namespace))

    def touch(self, post: Post, number: int) -> Answer:
        """Change a label, as a user or a tool does."""
        body = json.dumps({"metadata": {"labels": {"touched": str(number)}}}).encode()
        return self._client.send("PATCH", f"{self.collection(post.kind)}/{post.name}", body, MERGE)

    def rights(self, verb: str, kind: str, namespace: str) -> bool:
        """Return whether the tenant may do this to a kind of object in this namespace."""
        path = COLLECTIONS[kind].format(namespace)
        if verb == "create":
            return self._client.send("POST", path + "?dryRun=All", b"{}").code != 403
        return self._client.send("GET", path).code != 403

    def clean(self, kinds: Iterable[str] = ("ZeroTrainingJob", "Pod", "ConfigMap", "Secret")) -> None:
        """Delete all objects of these kinds with one request per kind."""
        for kind in kinds:
            path = f"{self.collection(kind)}?gracePeriodSeconds=0"
            # A policy that forbids it stays in the API server's cache for a moment after its deletion.
            wait_until(lambda path=path: self._client.delete_all(path), f"every {kind} to be deleted")
