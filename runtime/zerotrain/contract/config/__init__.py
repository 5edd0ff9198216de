"""The DeepSpeed-style JSON configuration: `load` a file, `resolve` it for a world size.

The engine (`initialize`), the operator (admission), the planner and `zerotrain config show` use it. It needs
only the standard library.
"""

from .auto import AutoValues
from .errors import ConfigError
from .reader import RawConfig, load, loads
from .resolve import resolve
from .schema import (
    ActivationCheckpointingConfig,
    AioConfig,
    BatchConfig,
    EngineConfig,
    KeyReport,
    LeafModuleConfig,
    Notice,
    OffloadConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
    SpillConfig,
    Unsupported,
    ZeroConfig,
)

__all__ = [
    "ActivationCheckpointingConfig",
    "AioConfig",
    "AutoValues",
    "BatchConfig",
    "ConfigError",
    "EngineConfig",
    "KeyReport",
    "LeafModuleConfig",
    "Notice",
    "OffloadConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "RawConfig",
    "SchedulerConfig",
    "SpillConfig",
    "Unsupported",
    "ZeroConfig",
    "load",
    "loads",
    "resolve",
]
