"""Checks before the alias is activated: what it would hide, and what has already looked for DeepSpeed."""

from __future__ import annotations

import importlib.util
import sys

from zerotrain.compat.alias import NAME

LOOKED_ALREADY = ("transformers", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric")
"""Libraries that look for DeepSpeed once, when they are imported."""


class CompatError(RuntimeError):
    """`import deepspeed` cannot give the engine in this process; the message says what to do."""


def check_nothing_has_looked() -> None:
    """Raise CompatError if the alias would come too late in this process."""
    if imported := [name for name in (NAME, *LOOKED_ALREADY) if name in sys.modules]:
        raise CompatError(
            f"{', '.join(imported)} was imported before zerotrain.compat.deepspeed() and has already looked "
            "for DeepSpeed; move `import zerotrain.compat; zerotrain.compat.deepspeed()` to the top of the "
            "script, or start it with `zerotrain launch` or `python -m zerotrain.compat`, which need no line"
        )


def check_none_is_hidden(*, replace: bool) -> None:
    """Raise CompatError if the alias would hide a real DeepSpeed, unless `replace` says that it may."""
    if not replace and (place := _installed()):
        raise CompatError(
            f"DeepSpeed is installed here ({place}), and `import deepspeed` would give zerotrain's engine "
            "instead; remove it (pip uninstall deepspeed), or say that you mean it: --replace-deepspeed of "
            "`zerotrain launch` and `python -m zerotrain.compat`, or zerotrain.compat.deepspeed(replace=True)"
        )


def _installed() -> str | None:
    """Return where a package deepspeed is, or its version; None if there is none. A folder of that name
    without code (configuration files, say) is none."""
    spec = importlib.util.find_spec(NAME)
    if spec is not None and spec.origin is not None:
        return spec.origin
    # Imported late: it slows the start of children, which check nothing.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"version {version(NAME)}"
    except PackageNotFoundError:
        return None
