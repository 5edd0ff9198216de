"""Detection of the torch variant: none, one for CPUs only, or one for CUDA.

The libraries inside decide, since indexes name the same build differently: one calls CUDA's `2.13.0+cu130`,
another `2.13.0`. The module uses only the standard library, because install.sh runs it in the build stage.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path, PurePosixPath

LIBRARIES = "torch/lib"
"""Folder of torch's libraries, in a wheel and in the folder of packages."""


class Torch(StrEnum):
    """The variant of torch that an image holds."""

    NONE = "none"
    CPU = "cpu"
    CUDA = "cuda"


class TorchError(ValueError):
    """A torch of another variant than requested; the message says what to do."""


_BUILDS = {"libtorch_cuda.so": Torch.CUDA, "libtorch_cpu.so": Torch.CPU}
"""Variant by its library, in this order, because each variant also has the library for CPUs."""
_NAMES = {Torch.NONE: "no torch", Torch.CPU: "torch for CPUs alone", Torch.CUDA: "torch for CUDA"}
_FOREIGN = {"libtorch_hip.so": "ROCm", "libtorch_xpu.so": "XPUs"}


def torch_of(files: Iterable[str]) -> Torch:
    """Return the variant that has these files, given as paths below the folder of packages.

    Raises TorchError.
    """
    paths = map(PurePosixPath, files)
    names = {path.name for path in paths if str(path.parent) == LIBRARIES}
    for library, platform in _FOREIGN.items():
        if library in names:
            raise TorchError(f"this torch is built for {platform} ({library}); take one for CPUs or for CUDA")
    return next((variant for library, variant in _BUILDS.items() if library in names), Torch.NONE)


def torch_in_wheels(folder: Path) -> Torch:
    """Return the variant among these wheels. Raises TorchError for several."""
    wheels = sorted(folder.glob("torch-*.whl"))
    if len(wheels) > 1:
        names = ", ".join(wheel.name for wheel in wheels)
        raise TorchError(f"{folder} holds more than one torch ({names}): empty it, and collect anew")
    if not wheels:
        return Torch.NONE
    with zipfile.ZipFile(wheels[0]) as archive:
        return torch_of(archive.namelist())


def torch_in_environment(prefix: Path) -> Torch:
    """Return the variant that is installed in a virtual environment."""
    packages = (prefix / "lib").glob("python3*/site-packages")
    return torch_of(
        str(path.relative_to(folder)) for folder in packages for path in (folder / LIBRARIES).glob("*.so")
    )


def require(wanted: Torch, found: Torch, place: str) -> None:
    """Raise TorchError if `place` holds another variant than the image should hold."""
    if found is not wanted:
        raise TorchError(
            f"the image is to hold {_NAMES[wanted]}, and {place} holds {_NAMES[found]}. pip's settings "
            "choose it (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf; in a Dockerfile PIP_ARGS): "
            "change them, or ask for the other variant (`python -m deploy.images build --torch cuda|cpu`, "
            "`--build-arg TORCH=cuda|cpu`)"
        )


def main(arguments: list[str]) -> int:
    """Check the arguments PREFIX VARIANT: return 1 unless the environment holds that variant."""
    prefix, wanted = Path(arguments[0]), arguments[1]
    try:
        if wanted not in list(Torch):
            raise TorchError(f"TORCH={wanted} is none of {', '.join(Torch)}")
        require(Torch(wanted), torch_in_environment(prefix), str(prefix))
    except TorchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
