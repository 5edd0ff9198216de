"""Records the losses of a script of others without changing it: where its library hands them to backward."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_losses: list[float] = []
_times: list[float] = []
_logged: dict[str, list[float]] = {}

RATE = "learning_rate"
KEYS = ("loss", RATE, "eval_loss", "eval_tokens", "grad_norm", "reward", "rewards/margins")
"""Values of the Trainer's logs that are recorded besides the losses."""


def install() -> None:
    """Record the losses of Accelerate's loops (the Trainer's included) and of Lightning's."""
    import accelerate
    from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
    from lightning.pytorch.strategies import Strategy
    from transformers import Trainer

    _record(accelerate.Accelerator, "backward")
    _record(Strategy, "backward")
    _record(FabricStrategy, "backward")
    log: Any = Trainer.log

    def logged(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        for key in KEYS:
            if logs.get(key) is not None:
                _logged.setdefault(key, []).append(float(logs[key]))
        return log(self, logs, *args, **kwargs)

    Trainer.log = logged  # type: ignore[method-assign]


def _record(owner: Any, name: str) -> None:
    inner = getattr(owner, name)

    def recorded(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        _losses.append(float(loss.detach()))
        _times.append(time.perf_counter())
        return inner(self, loss, *args, **kwargs)

    setattr(owner, name, recorded)


def write(path: Path) -> None:
    """Write what this process recorded."""
    path.write_text(json.dumps({"losses": _losses, "times": _times, "logged": _logged}))
