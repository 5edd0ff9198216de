"""Quantities are exact and read as Kubernetes reads them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from zerotrain.operator.api.quantity import Bytes, Cpu, Quantity, format_bytes

pytestmark = pytest.mark.unit


BYTES = TypeAdapter[Quantity](Bytes)
CPU = TypeAdapter[Quantity](Cpu)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("512Gi", 512 * 2**30),
        ("1.5Gi", 3 * 2**29),
        ("2Ti", 2 * 2**40),
        ("1k", 1000),
        ("1.1k", 1100),
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("1e3", 1000),
        ("12E2", 1200),
        (".5Ki", 512),
        (1073741824, 2**30),
        (5e8, 500_000_000),
    ],
)
def test_bytes(written: object, expected: int) -> None:
    assert BYTES.validate_python(written).num_bytes == expected


@pytest.mark.parametrize(
    ("written", "expected"), [("500m", Fraction(1, 2)), ("0.1", Fraction(1, 10)), (4, Fraction(4))]
)
def test_cores(written: object, expected: Fraction) -> None:
    assert CPU.validate_python(written).value == expected


def test_a_fraction_of_a_byte_counts_as_a_byte() -> None:
    assert Quantity("0.0001k").num_bytes == 1


@pytest.mark.parametrize("written", ["512GB", "0", "0Gi", "-1Gi", "", "Gi", "1 Gi", True, 0, -1, 1.5, None])
def test_no_size(written: object) -> None:
    with pytest.raises(ValidationError):
        BYTES.validate_python(written)


@pytest.mark.parametrize("written", ["4Gi", "0", "500u", "two"])
def test_no_number_of_cores(written: object) -> None:
    with pytest.raises(ValidationError):
        CPU.validate_python(written)


@pytest.mark.parametrize("amount", [1, 1023, 1024, 3 * 2**29, 2**40, 7 * 2**50 + 1])
def test_formatting_loses_nothing(amount: int) -> None:
    assert Quantity(format_bytes(amount)).num_bytes == amount


def test_text_survives_a_round_trip() -> None:
    parsed: Any = BYTES.validate_python("1.50Gi")
    assert BYTES.dump_python(parsed, mode="json") == "1.50Gi"
