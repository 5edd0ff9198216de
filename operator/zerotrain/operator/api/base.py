"""Base of every API model, and the types that its fields are declared with.

A model is the single source of a part of the API: types, bounds and defaults are pydantic's, the docstring
under a field is what `kubectl explain` prints, and what OpenAPI cannot express stands beside it as a CEL
rule. `crd.py` turns all of it into the CustomResourceDefinition.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    Strict,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

VALIDATIONS = "x-kubernetes-validations"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Rule that the types cannot express, in two forms: for the API server, and for job files that never
    reach one."""

    cel: str
    """CEL expression over `self`, the part of the object that the model describes."""

    message: str
    holds: Callable[[Any], bool] | None
    """Condition over the model that equals `cel`; None for a rule that compares with the stored object."""

    field_path: str | None
    """Property below `self` that the API server's message points to."""

    loc: tuple[str, ...]
    """Path of the same property in pydantic's errors; may also name what no schema describes
    (metadata.name)."""

    message_cel: str | None = None
    """CEL expression that computes the message; `message` is used when that fails."""

    def entry(self) -> dict[str, Any]:
        """Return the entry for x-kubernetes-validations."""
        place = {} if self.field_path is None else {"fieldPath": self.field_path}
        computed = {} if self.message_cel is None else {"messageExpression": self.message_cel}
        return {"rule": self.cel, "message": self.message, **computed, **place}

    def error(self) -> InitErrorDetails:
        """Return the details for a ValidationError. The template keeps braces of the message from being
        placeholders."""
        kind = PydanticCustomError("rule", "{message}", {"message": self.message})
        return InitErrorDetails(type=kind, loc=self.loc, input=None)


def rule(
    cel: str,
    message: str,
    *,
    holds: Callable[[Any], bool] | None = None,
    field_path: str | None = None,
    loc: tuple[str, ...] = (),
) -> Rule:
    """Create a rule that holds for every object (give `holds`), or one about changes (`oldSelf` in `cel`).
    Raises ValueError unless exactly one of them is given."""
    if (holds is None) != ("oldSelf" in cel):
        raise ValueError(f"rule {message!r}: give `holds` unless the rule compares with oldSelf")
    place = tuple(field_path.strip(".").split(".")) if field_path else loc
    return Rule(cel=cel, message=message, holds=holds, field_path=field_path, loc=place)


_STATUS_WRITE = (
    "(has(self.status) && (!has(oldSelf.status) || (has(self.status.phase) && has(oldSelf.status.phase) && "
    "self.status.phase != oldSelf.status.phase)))"
)
"""CEL expression that is true for the status writes that occur in every job. The API server lets such a write
change nothing else, and puts the stored status into every other write before it evaluates rules."""


def one_for_changes(path: str, rules: Sequence[Rule], message: str) -> Rule:
    """Fold all rules about changes of the field `path` into one rule of the whole object, whose message names
    each field at fault.

    The API server evaluates every rule at every write, of the status too. Every `self.field` costs it a copy
    of the list of all fields, and a comparison of two objects one copy per field. So status writes that
    accompany the start of a job are recognised by their phase, and everything else that did not change by one
    comparison.
    """
    for item in rules:
        if item.holds is not None or "'" in item.message:
            raise ValueError(f"rule {item.message!r}: only rules about changes, without quotes, can be one")
    cels = [re.sub(r"\b(self|oldSelf)\.", rf"\1.{path}.", item.cel) for item in rules]
    messages = " + ".join(
        f"(({cel}) ? '' : '{path}{item.field_path or ''}: {item.message}. ')"
        for cel, item in zip(cels, rules, strict=True)
    )
    same = f"{_STATUS_WRITE} || self.{path} == oldSelf.{path}"
    folded = rule(f"{same} || ({' && '.join(f'({cel})' for cel in cels)})", message, field_path=f".{path}")
    return replace(folded, message_cel=f"({messages}).trim()")


def one_of(*fields: str, note: str = "", field_path: str | None = None) -> Rule:
    """Create a rule that exactly one of the fields (names of the API) is given."""

    def holds(model: ApiModel) -> bool:
        named = {info.alias: name for name, info in type(model).model_fields.items()}
        return sum(getattr(model, named[field]) is not None for field in fields) == 1

    given = ", ".join(f"has(self.{field})" for field in fields)
    message = f"exactly one of {', '.join(fields)} must be given{note}"
    return rule(f"[{given}].exists_one(given, given)", message, holds=holds, field_path=field_path)


class ApiModel(BaseModel):
    """Part of the spec: camelCase in the API, unknown keys are an error, instances are immutable."""

    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Rules beyond the types of the fields."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [item for item in self.RULES if item.holds is not None and not item.holds(self)]
        if broken:
            # Raised as pydantic's own error, so that each rule keeps the path of its field.
            raise ValidationError.from_exception_data(type(self).__name__, [item.error() for item in broken])
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        if cls.RULES:
            handler.resolve_ref_schema(schema)[VALIDATIONS] = [item.entry() for item in cls.RULES]
        return schema


class ObservedModel(ApiModel):
    """Part that the operator reads back: a newer operator may have written keys that this version does not
    know."""

    model_config = ConfigDict(extra="ignore")


def _whole_number(value: object) -> object:
    """Accept 1e3 as the API server does: JSON has one kind of number. No number of the API has more than 64
    bits."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number has at most 64 bits")
    return value


Int = Annotated[int, Strict(), BeforeValidator(_whole_number)]
"""Whole number; neither "8" nor true is accepted as one, as in the API server."""

Seconds = Annotated[Int, Field(ge=1, le=31_536_000)]
"""Number of seconds, from 1 second to 365 days."""

Bool = Annotated[bool, Strict()]
Number = Annotated[float, Field(strict=True)]

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
QUALIFIED_NAME = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
)
LABEL_VALUE = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"

DnsLabel = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=DNS_LABEL)]
ObjectName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
QualifiedName = Annotated[str, StringConstraints(min_length=1, max_length=317, pattern=QUALIFIED_NAME)]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=LABEL_VALUE)]
LabelMap = Annotated[dict[str, LabelValue], Field(max_length=64)]
FileKey = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
"""Key of a ConfigMap or Secret."""

Argument = Annotated[str, StringConstraints(max_length=8192)]


def keyed_by(*keys: str) -> dict[str, Any]:
    """Return the schema keys of a list whose items merge by `keys` under server-side apply."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def unique_by(*attributes: str) -> AfterValidator:
    """Return a validator that no two items share the attributes, as the API server demands of a list that is
    `keyed_by` them."""
    named = " and ".join(to_camel(attribute) for attribute in attributes)

    def check(items: tuple[ApiModel, ...]) -> tuple[ApiModel, ...]:
        keys = (tuple(str(getattr(item, attribute)) for attribute in attributes) for item in items)
        for key, times in Counter(keys).items():
            if times > 1:
                given = " and ".join(map(repr, key))
                raise ValueError(f"{named} {given}: found {times} times; keep one of them")
        return items

    return AfterValidator(check)


ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
"""Schema keys of a list that is replaced as a whole."""

SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
ATOMIC_MAP: dict[str, Any] = {"x-kubernetes-map-type": "atomic"}
