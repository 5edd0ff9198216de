"""Networks that a job's pods may connect to, within what the installation allows."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from .base import ATOMIC, ApiModel


def _checked(text: str) -> str:
    try:
        ip_network(text)
    except ValueError as error:
        raise ValueError(f"must be a network in CIDR form, such as 10.1.0.0/16; {error}") from error
    return text


Cidr = Annotated[
    str,
    StringConstraints(min_length=4, max_length=49, pattern=r"^[0-9a-fA-F:.]+/[0-9]{1,3}$"),
    AfterValidator(_checked),
]


class Network(ApiModel):
    """Networks that the job's pods may connect to, besides its own ranks and DNS."""

    egress_cidrs: Annotated[tuple[Cidr, ...], Field(max_length=32, json_schema_extra=ATOMIC)] = ()
    """Networks that the pods, init containers included, may connect to on all ports: of a hub, a bucket, a
    tracker. Only parts of what the operator's installation allows (jobs.allowedEgressCidrs of the chart; none
    unless given). May be changed at any time; the policy follows within two resyncs of the operator."""


_MAPPED = IPv6Network("::ffff:0:0/96")


def is_within(cidr: str, bounds: Iterable[str]) -> bool:
    """Return whether the whole network lies in one of `bounds`. Text that is no network lies in none, nor do
    IPv4 addresses in the form of IPv6: network plugins take ::ffff:10.0.0.0/104 for 10.0.0.0/8."""
    try:
        asked = ip_network(cidr)
    except ValueError:
        return False
    if isinstance(asked, IPv6Network) and asked.subnet_of(_MAPPED):
        return False
    return any(_contains(ip_network(bound, strict=False), asked) for bound in bounds)


def _contains(bound: IPv4Network | IPv6Network, asked: IPv4Network | IPv6Network) -> bool:
    if isinstance(bound, IPv4Network) and isinstance(asked, IPv4Network):
        return asked.subnet_of(bound)
    if isinstance(bound, IPv6Network) and isinstance(asked, IPv6Network):
        return asked.subnet_of(bound)
    return False
