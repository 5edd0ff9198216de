"""Kubernetes quantities: "512Gi", "250m", 4.

The API server keeps what the user wrote (text or whole number); `Quantity` keeps it too and converts on
demand, exactly, so that a byte count is never a rounded float.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_SUFFIXES: dict[str, Fraction] = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{suffix: Fraction(1000**power) for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", start=1)},
}
# At least one digit that is not zero: a resource of size 0 is a mistake everywhere in this API.
_POSITIVE = r"([0-9]*[1-9][0-9]*(\.[0-9]*)?|[0-9]*\.[0-9]*[1-9][0-9]*)"
_EXPONENT = r"[eE]\+?[0-9]{1,2}"
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([eE][+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i)?)")
_MAX_LENGTH = 32

BYTES_PATTERN = rf"^{_POSITIVE}([KMGTPE]i|[kMGTPE]|{_EXPONENT})?$"
CPU_PATTERN = rf"^{_POSITIVE}m?$"
ANY_PATTERN = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"


class Quantity(str):
    """Amount as the user wrote it. Equality compares the text; compare `value` for the amount."""

    __slots__ = ()

    @property
    def value(self) -> Fraction:
        """Exact amount. Raises ValueError when the text is no quantity."""
        match = _NUMBER.fullmatch(self)
        if match is None:
            raise ValueError(
                f"quantity {str(self)!r} is not a number with a suffix such as 500m, 4, 1.5 or 16Gi"
            )
        number, exponent, suffix = match.groups()
        if exponent:
            return Fraction(number) * Fraction(10) ** int(exponent[1:])
        return Fraction(number) * _SUFFIXES[suffix or ""]

    @property
    def num_bytes(self) -> int:
        """Amount in bytes, rounded up to a whole byte as the scheduler does."""
        return math.ceil(self.value)


def _refusal(message: str) -> PydanticCustomError:
    return PydanticCustomError("quantity", "{message}", {"message": message})


class _Schema:
    """Pydantic's view of a Quantity: text with a pattern, or a whole number."""

    def __init__(self, pattern: str, *, minimum: int, example: str) -> None:
        self._pattern = pattern
        self._minimum = minimum
        self._example = example

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        compiled = re.compile(self._pattern)

        def parse(value: object) -> Quantity:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise _refusal(f"a quantity is text or a whole number; got {value!r}, write it in quotes")
            if isinstance(value, int) and value < self._minimum:
                raise _refusal(f"a quantity must be at least {self._minimum}; got {value}")
            text = str(value)
            if len(text) > _MAX_LENGTH or compiled.match(text) is None:
                raise _refusal(f"must be {self._example}; got {text!r}")
            return Quantity(text)

        return core_schema.no_info_plain_validator_function(
            parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "minimum": self._minimum,
            "maxLength": _MAX_LENGTH,
            "pattern": self._pattern,
        }


_SIZE = "a size such as 16Gi, 1.5T or 1073741824"
_CORES = "a number of cores such as 32, 0.5 or 500m"
_AMOUNT = "a quantity such as 500m, 4 or 16Gi"

Bytes = Annotated[Quantity, _Schema(BYTES_PATTERN, minimum=1, example=_SIZE)]
Cpu = Annotated[Quantity, _Schema(CPU_PATTERN, minimum=1, example=_CORES)]
AnyQuantity = Annotated[Quantity, _Schema(ANY_PATTERN, minimum=0, example=_AMOUNT)]
"""Quantity of any resource of Kubernetes."""


def format_bytes(amount: int) -> str:
    """Return the shortest exact binary form: 17179869184 -> 16Gi."""
    for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
        unit = int(_SUFFIXES[suffix])
        if amount and amount % unit == 0:
            return f"{amount // unit}{suffix}"
    return str(amount)
