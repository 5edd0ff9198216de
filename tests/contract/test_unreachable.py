"""Last output of programs that could not reach a hub, a bucket or a tracker is told from all other output."""

from __future__ import annotations

import pytest

from zerotrain.contract.unreachable import MAX_CHARS, reports_unreachable_host

pytestmark = pytest.mark.unit

UNREACHABLE = [
    "socket.gaierror: [Errno -2] Name or service not known",
    "socket.gaierror: [Errno -3] Temporary failure in name resolution",
    "curl: (6) Could not resolve host: huggingface.co",
    "curl: (28) Failed to connect to s3.example.org port 443 after 130000 ms: Couldn't connect to server",
    "wget: bad address 'example.org'",
    "fatal: unable to access 'https://github.com/a/b/': Could not resolve host: github.com",
    "dial tcp: lookup storage.googleapis.com on 10.96.0.10:53: no such host",
    'Get "https://hub/": dial tcp 10.1.2.3:443: i/o timeout',
    "dial tcp 10.1.2.3:443: connect: connection refused",
    "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries "
    "exceeded with url: /api/models (Caused by NewConnectionError('<urllib3...>: Failed to establish a new "
    "connection: [Errno 101] Network is unreachable'))",
    'botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "https://s3/b"',
    'botocore.exceptions.ConnectTimeoutError: Connect timeout on endpoint URL: "https://s3/b"',
    "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in "
    "the cached files.",
    "urllib.error.URLError: <urlopen error [Errno 110] Connection timed out>",
    "httpx.ConnectTimeout: timed out",
    "Error: getaddrinfo ENOTFOUND api.wandb.ai",
    "OSError: [Errno 113] No route to host",
]
OTHERS = [
    "",
    "RuntimeError: CUDA out of memory",
    "ValueError: loss is NaN",
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/https'",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection refused [10.1.2.3]:29400",
    "RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:83] rp != nullptr. No route to host",
    "torch.distributed.DistNetworkError: The TCPStore client timed out: Name or service not known",
    "NCCL WARN socketStartConnect: Connect to 10.1.2.3 failed: Network is unreachable",
    "Connection reset by peer",
    "TimeoutError: the loader waited 600 s",
    "PermissionError: [Errno 13] Permission denied: '/root'",
    "KeyError: 'hosts'",
]


@pytest.mark.parametrize("text", UNREACHABLE)
def test_it_is_recognised(text: str) -> None:
    assert reports_unreachable_host(text)
    assert reports_unreachable_host(f"exit code 1 (error): {text.upper()}")


@pytest.mark.parametrize("text", OTHERS)
def test_other_troubles_are_not_taken_for_it(text: str) -> None:
    assert not reports_unreachable_host(text)


def test_only_the_end_of_a_long_text_is_looked_at() -> None:
    assert reports_unreachable_host("x" * 10 * MAX_CHARS + UNREACHABLE[0])
    assert not reports_unreachable_host(UNREACHABLE[0] + "x" * MAX_CHARS)
