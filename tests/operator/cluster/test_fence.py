"""A replica whose lease may have passed to another one writes nothing: no status, no pods, no events."""

from __future__ import annotations

import pytest

from tests.operator.api_double import ApiDouble, served
from zerotrain.operator.cluster.api import Request
from zerotrain.operator.cluster.errors import NotLeading

pytestmark = pytest.mark.ranks


POD = "/api/v1/namespaces/ml/pods/gpt-1-0"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/ops/leases/op"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_a_write_is_not_sent(method: str) -> None:
    double = ApiDouble()
    double.on(f"{method} {POD}", (200, {}))
    async with served(double) as api:
        api.may_write = lambda: False
        with pytest.raises(NotLeading):
            await api.call(Request(method=method, path=POD, kind="pods"))
        assert double.requests == [], "sent, or tried again"
        api.may_write = lambda: True
        await api.call(Request(method=method, path=POD, kind="pods"))
    assert len(double.requests) == 1


async def test_a_lease_that_ends_between_two_tries_stops_the_second() -> None:
    double = ApiDouble()
    double.on(f"POST {POD}", (503, {}))
    leads = iter([True, False])
    async with served(double) as api:
        api.may_write = lambda: next(leads)
        with pytest.raises(NotLeading):
            await api.call(Request(method="POST", path=POD, kind="pods"))
    assert len(double.requests) == 1


async def test_reading_and_the_lease_itself_go_on() -> None:
    double = ApiDouble()
    double.on(f"GET {POD}", (200, {}))
    double.on(f"PUT {LEASE}", (200, {}))
    async with served(double) as api:
        api.may_write = lambda: False
        await api.call(Request(method="GET", path=POD, kind="pods"))
        await api.call(Request(method="PUT", path=LEASE, kind="leases"))
