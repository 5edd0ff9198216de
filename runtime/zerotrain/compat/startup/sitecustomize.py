"""Start of a Python process whose parent uses zerotrain.compat: `import deepspeed` gives the same as there.

Python imports this module before the process's program. It loads no torch, then runs the `sitecustomize` that
Python would have run without it. In an interpreter without zerotrain it does only that.
"""

import importlib.machinery
import importlib.util
import os
import sys


def activate() -> None:
    try:
        from zerotrain.compat.activation import activate as activate_alias
    except ImportError:
        return
    activate_alias()


def run_next() -> None:
    """Run the next `sitecustomize` on the path, which takes this module's place."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


activate()
run_next()
