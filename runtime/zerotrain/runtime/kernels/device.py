"""The kernels of each device: which families may be used there, and why others may not.

A family is used only after it equalled its reference on that very device, when the first caller of the
process asks. Otherwise, and where the driver refuses the code, callers take torch's operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # compiled code
    from zerotrain.runtime._native import Kernels


class Family(Enum):
    """Kernels that are checked and used together."""

    SUMS = "sums"
    QUANTIZE = "quantize"
    ADAM = "adam"


@dataclass(frozen=True, slots=True)
class DeviceKernels:
    """The kernels of one device, and the reason of each family that may not be used."""

    kernels: Kernels | None
    refused: Mapping[Family, str] = field(default_factory=dict)

    def of(self, family: Family) -> Kernels | None:
        """Return the kernels if the family may be used."""
        return None if family in self.refused else self.kernels


IMAGE = "_native_cuda.fatbin"
"""Name of the compiled kernels, a file beside the native module."""

_found: dict[torch.device, DeviceKernels] = {}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def find(tensor: torch.Tensor, family: Family) -> Kernels | None:
    """Return the kernels for this tensor's device if the family may be used, else None.

    Tensors of other classes have no memory of their own or another meaning, so they get none.
    """
    if type(tensor) not in _PLAIN:
        return None
    found = _found.get(tensor.device)
    if found is None:
        if tensor.device.type != "cuda":
            return None
        found = on_device(tensor.device)
    return found.of(family)


def on_device(device: torch.device) -> DeviceKernels:
    """Return the kernels of a CUDA device, named with its number; the first call loads and checks them."""
    if device not in _found:
        _found[device] = _load(device)
    return _found[device]


def _load(device: torch.device) -> DeviceKernels:
    try:
        native = import_module("zerotrain.runtime._native")
        kernels = native.device_kernels(read_image(native), device.index)
    except (ImportError, OSError, RuntimeError) as error:
        return DeviceKernels(None, dict.fromkeys(Family, str(error)))
    return checked(kernels, device)


def checked(kernels: Kernels, device: torch.device) -> DeviceKernels:
    """Compare all kernels with their references on the device, and return what may be used."""
    check = import_module("zerotrain.runtime.kernels.check")  # needs compiled code
    return DeviceKernels(kernels, check.refusals(kernels, device))


def read_image(native: ModuleType) -> bytes:
    """Return the compiled kernels of this installation. Raises FileNotFoundError if it was built without
    nvcc."""
    path = Path(str(native.__file__)).with_name(IMAGE)
    if not path.exists():
        raise FileNotFoundError(f"this installation was built without nvcc: {path} is missing")
    return path.read_bytes()


def stream_of(tensor: torch.Tensor) -> int:
    """Return the address of the stream on which torch computes now on the tensor's device."""
    if tensor.device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Names of the element types that kernels take."""
