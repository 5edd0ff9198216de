"""Network egress that a job opens for its own pods: within the installation's bounds, in its NetworkPolicy,
and named where a program could not connect.
"""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.operator.reconcile_builders import (
    NOW,
    Row,
    Want,
    check,
    ended,
    job,
    last_words,
    ready,
    seen,
    settled,
    status,
)
from tests.support.jobs import job_json, make_job
from zerotrain.client.diagnosis.advice import advice_for
from zerotrain.client.job import Job
from zerotrain.operator.api.network import is_within
from zerotrain.operator.controller.config import OperatorConfig, OperatorConfigError
from zerotrain.operator.reconcile import reconcile
from zerotrain.operator.resources import ResourceOptions, network_policy

pytestmark = pytest.mark.unit

Json = dict[str, Any]
BOUNDS = ("10.0.0.0/8", "2001:db8::/32")


def opened(asked: list[str], *bounds: str, extra: tuple[str, ...] = ()) -> set[str]:
    options = ResourceOptions(allowed_egress_cidrs=bounds, extra_egress_cidrs=extra)
    policy = network_policy(make_job({"spec.network": {"egressCidrs": asked}}), options)
    peers = [peer for rule in policy["spec"]["egress"] if "ports" not in rule for peer in rule["to"]]
    return {peer["ipBlock"]["cidr"] for peer in peers if "ipBlock" in peer}


def test_the_policy_opens_what_is_asked_for_and_allowed_and_no_more() -> None:
    asked = ["10.1.0.0/16", "192.0.2.0/24", "2001:db8:1::/48", "0.0.0.0/0", "::/0"]
    assert opened(asked, *BOUNDS) == {"10.1.0.0/16", "2001:db8:1::/48"}
    assert opened(asked) == set()
    assert opened([], *BOUNDS, extra=("192.0.2.1/32",)) == {"192.0.2.1/32"}


@given(
    asked=st.ip_addresses(v=4).flatmap(lambda ip: st.integers(0, 32).map(lambda bits: f"{ip}/{bits}")),
    bound=st.ip_addresses(v=4).flatmap(lambda ip: st.integers(0, 32).map(lambda bits: f"{ip}/{bits}")),
)
def test_a_network_is_within_when_its_first_and_last_address_are(asked: str, bound: str) -> None:
    inner, outer = ip_network(asked, strict=False), ip_network(bound, strict=False)
    assert is_within(str(inner), [bound]) == (inner[0] in outer and inner[-1] in outer)


@pytest.mark.parametrize("cidr", ["::ffff:0:0/96", "::ffff:10.0.0.0/104", "::ffff:a00:1/128"])
def test_ipv4_in_the_form_of_ipv6_is_within_no_bound(cidr: str) -> None:
    """Network plugins written in Go take such a network for one of IPv4."""
    assert not is_within(cidr, ["::/0"])
    assert is_within("::/0", ["::/0"])
    assert is_within("2001:db8::/32", ["::/0"])


@pytest.mark.parametrize("cidr", ["10.0.0.1/8", "10.0.0.0", "10.0.0.0/33", "a.b.c.d/8", "::/129", "0/0", ""])
def test_what_is_no_network_is_refused(cidr: str) -> None:
    with pytest.raises(ValidationError, match=r"network.egressCidrs"):
        make_job({"spec.network": {"egressCidrs": [cidr]}})
    assert "/" not in cidr or not is_within(cidr, ["0.0.0.0/0", "::/0"])


def test_the_installation_sets_the_bounds() -> None:
    config = OperatorConfig.from_env({"ZEROTRAIN_OPERATOR_ALLOWED_EGRESS_CIDRS": ", ".join(BOUNDS)})
    assert config.resources.allowed_egress_cidrs == BOUNDS
    assert OperatorConfig.from_env({}).resources.allowed_egress_cidrs == ()
    with pytest.raises(OperatorConfigError, match="ALLOWED_EGRESS_CIDRS"):
        OperatorConfig.from_env({"ZEROTRAIN_OPERATOR_ALLOWED_EGRESS_CIDRS": "everything"})


SPEC: Json = {"network": {"egressCidrs": ["192.0.2.0/24"]}, "scheduling": {"gang": "None"}}


@pytest.mark.parametrize(
    "row",
    [
        Row(
            id="more than is allowed",
            job=job(spec=SPEC),
            seen=seen(egress_bounds=BOUNDS),
            want=Want(
                phase="Stalled",
                attempt=0,
                actions=(),
                events=("EgressNotAllowed",),
                conditions={"Stalled": ("True", "EgressNotAllowed")},
                messages={
                    "Stalled": "spec.network.egressCidrs: 192.0.2.0/24 is not within what this installation "
                    "allows jobs (10.0.0.0/8, 2001:db8::/32)"
                },
            ),
        ),
        Row(
            id="nothing is allowed",
            job=job(spec=SPEC),
            seen=seen(),
            want=Want(phase="Stalled", messages={"Stalled": "allows jobs (none)"}),
        ),
        Row(
            id="allowed meanwhile",
            job=job(spec=SPEC, status=status("Stalled", attempt=0, podsCreated=False)),
            seen=seen(egress_bounds=("192.0.2.0/23",)),
            want=Want(phase="Pending", attempt=1),
        ),
        Row(
            id="changed while an attempt runs: it goes on, without that network",
            job=job(spec=SPEC, status=status("Running")),
            seen=seen(ready(0), ready(1)),
            want=Want(
                phase="Running",
                actions=(),
                events=("EgressNotAllowed",),
                conditions={"Admitted": ("True", "SpecAccepted")},
                messages={
                    "Admitted": "no other attempt will start: spec.network.egressCidrs: 192.0.2.0/24 is not",
                    "event": "no other attempt will start",
                },
            ),
        ),
    ],
    ids=lambda row: row.id,
)
def test_row(row: Row) -> None:
    check(row)
    again = reconcile(settled(row.job, row.seen), row.seen, NOW)
    assert not again.events


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("socket.gaierror: [Errno -2] Name or service not known", True),
        ("RuntimeError: gloo: No route to host", False),
        ("ValueError: loss is NaN", False),
    ],
)
@pytest.mark.parametrize("restarts", [5, 0], ids=["restarted", "at the end"])
def test_the_event_of_a_failure_names_the_policy(words: str, named: bool, restarts: int) -> None:
    spec = {"failurePolicy": {"maxRestarts": restarts}, "scheduling": {"gang": "None"}}
    pod = ended(0, 1, termination=last_words(1, exception=words))
    plan = reconcile(job(spec=spec, status=status("Running")), seen(pod, ended(1, 143)), NOW)
    messages = " ".join(event.message for event in plan.events)
    assert words in messages
    assert ("spec.network.egressCidrs" in messages) == named
    assert ("zerotrain.dev/job=" in messages) == named


@pytest.mark.parametrize(("line", "named"), [("curl: (6) Could not resolve host: hub", True), ("NaN", False)])
def test_describe_shows_what_to_do(line: str, named: bool) -> None:
    failure = {"attempt": 1, "time": "2026-01-01T00:00:00Z", "reason": "RankFailed", "lastLine": line}
    raw = job_json({"status": {"phase": "Restarting", "attempt": 1, "failures": [failure]}})
    advice = [item.text for item in advice_for(Job.of(raw), (), (), NOW)]
    assert any("spec.network.egressCidrs" in text for text in advice) == named
