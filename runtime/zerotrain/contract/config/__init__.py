"""The DeepSpeed-style JSON configuration: `load` a file, `resolve` it for a world size.

Used by the engine (`initialize`), the operator (admission), the planner and `zerotrain config show`.
Pure standard library.
"""

from .errors import ConfigError
from .schema import (
    ActivationCheckpointingConfig,
    AioConfig,
    BatchConfig,
    EngineConfig,
    KeyReport,
    Notice,
    OffloadConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
    Unsupported,
    ZeroConfig,
)

__all__ = [
    "ActivationCheckpointingConfig",
    "AioConfig",
    "BatchConfig",
    "ConfigError",
    "EngineConfig",
    "KeyReport",
    "Notice",
    "OffloadConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "SchedulerConfig",
    "Unsupported",
    "ZeroConfig",
]
