"""Unchanged scripts on this engine: `import deepspeed` gives `zerotrain.runtime.deepspeed`.

    import zerotrain.compat

    zerotrain.compat.deepspeed()      # first of all: before transformers, accelerate and the like

`zerotrain launch script.py` and `python -m zerotrain.compat script.py` do the same without the lines. Only
this process and the Python processes that it starts are affected; no package of that name is on disk.

    __main__ > program > __init__ > refusal, activation > alias, processes, libraries > distribution
"""

from __future__ import annotations

from zerotrain.compat import activation
from zerotrain.compat.refusal import CompatError, check_none_is_hidden, check_nothing_has_looked

__all__ = ["CompatError", "deepspeed"]


def deepspeed(*, replace: bool = False) -> None:
    """Make `import deepspeed` give `zerotrain.runtime.deepspeed`, here and in the Python processes that this
    one starts.

    Raises CompatError if a real DeepSpeed is installed, unless `replace`, or if a library that looks for
    DeepSpeed when it is imported was imported before. Further calls do nothing.
    """
    if activation.is_active():
        return
    check_nothing_has_looked()
    check_none_is_hidden(replace=replace)
    activation.activate()
