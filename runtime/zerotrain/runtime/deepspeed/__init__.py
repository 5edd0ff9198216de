"""DeepSpeed's module under its names: a script changes `import deepspeed` to

    from zerotrain.runtime import deepspeed

and likewise `from deepspeed.utils import ...` to `from zerotrain.runtime.deepspeed.utils import ...`. All
names are aliases; docs/deepspeed.md lists them and the differences. Other names are not part of zerotrain:
importing them fails at once, with the reason.
"""

from __future__ import annotations

from argparse import ArgumentParser

from zerotrain.contract.deepspeed import VERSION
from zerotrain.runtime.comm.start import init_distributed
from zerotrain.runtime.deepspeed import (
    absent,
    accelerator,
    checkpoint,
    checkpointing,
    comm,
    ops,
    runtime,
    utils,
    zero,
)
from zerotrain.runtime.deepspeed.accelerator import get_accelerator
from zerotrain.runtime.deepspeed.utils.init_on_device import OnDevice
from zerotrain.runtime.engine import Engine as DeepSpeedEngine
from zerotrain.runtime.initialization import initialize

__all__ = [
    "DeepSpeedEngine",
    "OnDevice",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "runtime",
    "utils",
    "zero",
]

__version__ = VERSION

__getattr__ = absent.attributes_of(__name__)
absent.install()


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE`; `initialize(args=...)` reads the latter."""
    group = parser.add_argument_group("zerotrain", "the engine's configuration")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine (the script decides)")
    group.add_argument("--deepspeed_config", default=None, help="configuration file, JSON")
    return parser
