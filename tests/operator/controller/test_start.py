"""Start of the operator: its variables, its channel key, and the effect of a stall on /healthz."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Gauge

from tests.support.families import LOOPBACKS, need
from tests.support.ports import free_port
from zerotrain.operator.cluster.channel import ChannelKind
from zerotrain.operator.cluster.telemetry import Telemetry
from zerotrain.operator.controller import health
from zerotrain.operator.controller.config import OperatorConfig, OperatorConfigError, operator_key
from zerotrain.operator.controller.health import (
    MAX_CONNECTIONS,
    MAX_LAG_S,
    MAX_WATCH_AGE_S,
    health_problems,
    serve,
    unreadable_lines,
)


@pytest.mark.unit
def test_without_variables_the_defaults_hold_and_every_process_has_its_own_identity() -> None:
    first, second = OperatorConfig.from_env({}), OperatorConfig.from_env({})
    assert first.namespace == "zerotrain-system"
    assert first.channel is None
    assert first.identity != second.identity


@pytest.mark.unit
def test_variables_are_read() -> None:
    config = OperatorConfig.from_env(
        {
            "ZEROTRAIN_OPERATOR_CHANNEL": "silent",
            "ZEROTRAIN_OPERATOR_REQUESTS_PER_SECOND": "50",
            "ZEROTRAIN_OPERATOR_EXTRA_EGRESS_CIDRS": "10.1.0.0/16, 10.2.0.0/16",
        }
    )
    assert config.channel is ChannelKind.SILENT
    assert config.limits.requests_per_second == 50
    assert config.resources.extra_egress_cidrs == ("10.1.0.0/16", "10.2.0.0/16")


@pytest.mark.unit
def test_dns_is_read() -> None:
    given = {"NAMESPACE": "dns", "LABELS": "k8s-app=dns, tier=", "CIDRS": "169.254.20.10/32"}
    found = OperatorConfig.from_env({f"ZEROTRAIN_OPERATOR_DNS_{name}": text for name, text in given.items()})
    assert found.resources.dns_namespace == "dns"
    assert found.resources.dns_labels == {"k8s-app": "dns", "tier": ""}
    assert found.resources.dns_cidrs == ("169.254.20.10/32",)
    assert OperatorConfig.from_env({}).resources.dns_labels == {"k8s-app": "kube-dns"}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "value"), [("WORKERS", "many"), ("CHANNEL", "carrier pigeon"), ("DNS_LABELS", "kube-dns")]
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(OperatorConfigError, match=f"ZEROTRAIN_OPERATOR_{name}='{value}'"):
        OperatorConfig.from_env({f"ZEROTRAIN_OPERATOR_{name}": value})


@pytest.mark.unit
def test_inside_a_cluster_the_key_must_be_given() -> None:
    with pytest.raises(OperatorConfigError, match="KEY_FILE must name"):
        operator_key(OperatorConfig(), in_cluster=True)


@pytest.mark.unit
def test_a_key_that_is_too_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("short")
    with pytest.raises(OperatorConfigError, match="holds 5 bytes, at least 32"):
        operator_key(OperatorConfig(key_file=file), in_cluster=True)


@pytest.mark.unit
def test_outside_a_cluster_a_key_is_made_once_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = operator_key(OperatorConfig(), in_cluster=False)
    assert len(key) >= 32
    assert operator_key(OperatorConfig(), in_cluster=False) == key
    (file,) = tmp_path.glob("build/**/*.key")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.unit
def test_what_may_not_be_read_is_reported_with_its_meaning() -> None:
    refused = {("pods", "ml"): True, ("pods", "other"): False, ("pods", ""): True, ("nodes", ""): True}
    assert unreadable_lines(refused) == [
        "namespace ml: pods may not be read, no job is reconciled",
        "the whole cluster: pods may not be read, no job is reconciled",
        "the whole cluster: nodes may not be read, lost, cordoned and tainted ones are not seen before their "
        "pods are",
    ]
    telemetry = Telemetry()
    telemetry.set_unreadable(refused)
    read = telemetry.registry.get_sample_value
    for (resource, namespace), is_refused in refused.items():
        labels = {"resource": resource, "watched_namespace": namespace}
        assert read("zerotrain_operator_unreadable", labels) == is_refused


@pytest.mark.unit
def test_health_is_about_the_loop_and_the_watch() -> None:
    assert health_problems(lag_s=0, watch_age_s=0) == []
    assert "event loop" in health_problems(lag_s=MAX_LAG_S + 1, watch_age_s=0)[0]
    assert "no event or bookmark" in health_problems(lag_s=0, watch_age_s=MAX_WATCH_AGE_S + 1)[0]


@pytest.mark.ranks
async def test_what_is_wrong_is_reported_with_a_code_that_restarts() -> None:
    wrong: list[str] = []
    address = f"127.0.0.1:{free_port()}"
    stop = await serve(
        address,
        problems=lambda: wrong,
        synced=lambda: False,
        registry=CollectorRegistry(),
        before_scrape=lambda: None,
    )

    async def ask(path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as answer:
            return answer.status, await answer.text()

    try:
        assert await ask("/healthz") == (200, "ok")
        wrong.append("no events")
        assert await ask("/healthz") == (503, "no events")
        assert (await ask("/readyz"))[0] == 503
        assert (await ask("/metrics"))[0] == 200
    finally:
        await stop()


@pytest.mark.ranks
async def test_connections_that_are_held_open_are_few_and_keep_no_probe_out() -> None:
    port = free_port()
    stop = await serve(
        f"127.0.0.1:{port}",
        problems=list,
        synced=lambda: True,
        registry=CollectorRegistry(),
        before_scrape=lambda: None,
    )
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS + 40)]
    try:
        for _, writer in held[::2]:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        url = f"http://127.0.0.1:{port}/healthz"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert await answer.text() == "ok"
        assert [await reader.read() for reader, _ in held[:40]] == [b""] * 40, "the oldest are closed"
        assert not any(reader.at_eof() for reader, _ in held[60:])
    finally:
        for _, writer in held:
            writer.close()
        await stop()


@pytest.mark.ranks
async def test_scrapes_that_are_never_read_share_one_text_and_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "SEND_S", 0.5)
    monkeypatch.setattr(health, "SHARED_S", 60.0)
    registry, port, made = CollectorRegistry(), free_port(), []
    Gauge("long", "x" * 20_000_000, registry=registry)
    stop = await serve(
        f"127.0.0.1:{port}",
        problems=list,
        synced=lambda: True,
        registry=registry,
        before_scrape=lambda: made.append(1),
    )
    held = [await asyncio.open_connection("127.0.0.1", port, limit=1) for _ in range(4)]
    try:
        for _, writer in held:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(2)
        for reader, _ in held:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(20_000_000), 10)
        assert len(made) == 1
    finally:
        for _, writer in held:
            writer.close()
        await stop()


@pytest.mark.ranks
@pytest.mark.parametrize("host", LOOPBACKS)
async def test_without_a_host_it_answers_over_both_families(host: str) -> None:
    need(host)
    port = free_port()
    config = OperatorConfig.from_env({"ZEROTRAIN_OPERATOR_HTTP_ADDRESS": f":{port}"})
    stop = await serve(
        config.http_address,
        problems=list,
        synced=lambda: True,
        registry=CollectorRegistry(),
        before_scrape=lambda: None,
    )
    try:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/healthz"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.status == 200
    finally:
        await stop()
