"""The part of a kubelet that serves container logs, over HTTPS, as the real API server reads them."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deploy.devcluster.cluster import INSTANCES
from tests.operator.kubelet_double import ensure_node
from tests.support.devcluster import PATIENCE_S, Cluster
from tests.support.kube_json import KubeJson


class KubeletLogs:
    """Logs by pod name; a pod that has none gets 404."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.asked: list[str] = []
        """Paths of the requests, in order."""
        self.open = threading.Event()
        """Event without which requests are accepted and not answered."""
        self.open.set()

    def answer(self, path: str) -> tuple[int, bytes]:
        self.asked.append(path)
        self.open.wait(timeout=PATIENCE_S)
        pod = path.split("?")[0].split("/")[3]
        text = self.texts.get(pod)
        return (404, b"no such container") if text is None else (200, text)


@contextmanager
def served_logs(cluster: Cluster, api: KubeJson, node: str) -> Iterator[KubeletLogs]:
    """Serve the logs of all pods on a node of that name, which is created and deleted again."""
    certificate = INSTANCES / cluster.name / "certs" / "kubelet.crt"
    if not cluster.name or not certificate.exists():
        pytest.skip("only a cluster of ours lets a test play its kubelet: it has the certificate")
    logs = KubeletLogs()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, text = logs.answer(self.path)
            with suppress(OSError):  # the client may have died
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, name="kubelet logs", daemon=True)
    thread.start()
    ensure_node(api, node)
    endpoint = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": server.server_port}},
    }
    api.patch(f"/api/v1/nodes/{node}/status", {"status": endpoint})
    try:
        yield logs
    finally:
        logs.open.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=PATIENCE_S)
        cluster.kubectl("delete", "node", node, "--wait=false", check=False)
