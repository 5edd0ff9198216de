"""The one error of the configuration.

Reader and resolver raise it; CLI, operator and trainer show it. Every message names the field, the rule, the
value and the way out, so that a user can fix the file without reading the code.
"""

from __future__ import annotations

from zerotrain.contract.text import one_line

_MAX_VALUE_CHARS = 120


class ConfigError(ValueError):
    """The configuration is wrong and the user must edit it; trying again cannot help.

    Attributes:
        path: dotted path of the field (`zero_optimization.stage`), or `file:line:column` for a syntax error.
        rule: what must hold, as a sentence without a final dot.
        value: what was found (any JSON value or text).
        way_out: what to write instead.
    """

    def __init__(self, path: str, rule: str, value: object, way_out: str) -> None:
        # The user chooses keys, and a rule or a way out may quote them. The value is shown by its repr().
        self.path = one_line(path)
        self.rule = one_line(rule)
        self.value = value
        self.way_out = one_line(way_out)
        super().__init__(self.path, self.rule, value, self.way_out)

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > _MAX_VALUE_CHARS:
            shown = shown[: _MAX_VALUE_CHARS - 3] + "..."
        return f"{self.path}: {self.rule}; got {shown}. {self.way_out}"
