"""The answers that a job file is made from.

Each is checked alone, so that a wrong one can be asked for again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zerotrain.contract.planner import ACCELERATORS, Accelerator, accelerator
from zerotrain.contract.presets import PRESETS

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,49}[a-z0-9])?")
FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
GPT_SHAPE = re.compile(r"gpt:(\d+)x(\d+)x(\d+)x(\d+)")
PYTHON_TEXT = "builtin:python-stdlib"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """All values of the file, apart from those that the planner chooses."""

    name: str
    image: str
    model: dict[str, Any]
    """Value of spec.model."""
    data: str
    steps: int
    workers: int
    gpus: int
    """GPUs of each worker; 0 trains on CPUs."""
    device: Accelerator | None
    cpu: str | None
    memory: str | None
    micro_batch: int
    accumulation: int
    learning_rate: float
    claim: str | None
    """PersistentVolumeClaim of the checkpoints; None saves no checkpoint."""
    every_steps: int
    nvme: str | None
    """Size of a volume that states may be spilled to."""

    @property
    def num_ranks(self) -> int:
        return self.workers * max(1, self.gpus)


def name(text: str) -> str:
    """Check the job's name. Raises ValueError, as do all parsers of this module."""
    if not NAME.fullmatch(text):
        raise ValueError(
            f"a job's name has up to 51 lower-case letters, digits and dashes and begins with a letter or "
            f"digit; got {text!r}"
        )
    return text


def model(text: str) -> dict[str, Any]:
    """Parse a preset, gpt:WIDTHxLAYERSxHEADSxCONTEXT, a folder in the worker, or package.module:function."""
    shape = GPT_SHAPE.fullmatch(text)
    if shape is not None:
        width, layers, heads, context = map(int, shape.groups())
        if heads == 0 or width % heads:
            raise ValueError(f"the width must be a multiple of the heads; got {width} and {heads}")
        return {"gpt": {"dModel": width, "layers": layers, "heads": heads, "context": context}}
    if text in PRESETS:
        return {"preset": text}
    if text.startswith("/") and len(text) > 1:
        return {"path": text}
    if FACTORY.fullmatch(text):
        return {"factory": {"function": text}}
    raise ValueError(
        f"{text!r} is no model: give one of {', '.join(sorted(PRESETS))}; gpt:WIDTHxLAYERSxHEADSxCONTEXT; "
        "the folder of a Hugging Face model in the image, such as /models/llama; or package.module:function"
    )


def data(text: str) -> str:
    """Check an absolute path in the worker, or the name of the text that every worker has."""
    if text != PYTHON_TEXT and not (text.startswith("/") and len(text) > 1):
        raise ValueError(f"data is an absolute path in the worker, or {PYTHON_TEXT}; got {text!r}")
    return text


def device(text: str) -> Accelerator | None:
    """Find a GPU by name. Empty text stands for a GPU that is not known."""
    if not text:
        return None
    found = accelerator(text)
    if found is None:
        raise ValueError(
            f"{text!r} is unknown or ambiguous; known are {', '.join(item.name for item in ACCELERATORS)}"
        )
    return found


def count(text: str, *, least: int = 1, most: int = 10**12) -> int:
    """Parse a whole number from `least` to `most`."""
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"a whole number is needed; got {text!r}") from None
    if not least <= value <= most:
        raise ValueError(f"a number from {least} to {most} is needed; got {value}")
    return value


def num_gpus(text: str) -> int:
    """Parse the number of GPUs of one worker."""
    return count(text, least=0, most=64)
