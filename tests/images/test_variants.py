"""The torch variant of an image: how it is recognised, that another one is refused, and its size limit."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from deploy.images.__main__ import build_image, check_size, main
from deploy.images.context import IMAGES, Image, ImageError, torch_among, wheels_key
from deploy.images.tools import Buildah
from deploy.images.variants import (
    Torch,
    TorchError,
    torch_in_environment,
    torch_in_wheels,
    torch_of,
)
from deploy.images.variants import main as check

RUNTIME, OPERATOR = IMAGES["runtime"], IMAGES["operator"]
FILES = {
    Torch.NONE: ("numpy/__init__.py",),
    Torch.CPU: ("torch/version.py", "torch/lib/libc10.so", "torch/lib/libtorch_cpu.so"),
    Torch.CUDA: ("torch/lib/libtorch_cpu.so", "torch/lib/libtorch_cuda.so", "nvidia/cublas/lib/libcublas.so"),
}
VARIANTS = pytest.mark.parametrize("variant", list(Torch))
BASE, TAG = "base", "image"


def wheels(folder: Path, variant: Torch, version: str = "9.9") -> Path:
    """Make a folder with a wheel of torch like this variant's."""
    name = "numpy" if variant is Torch.NONE else "torch"
    with zipfile.ZipFile(folder / f"{name}-{version}-cp311-cp311-linux_x86_64.whl", "w") as archive:
        for path in FILES[variant]:
            archive.writestr(path, "")
    return folder


def environment(prefix: Path, variant: Torch) -> Path:
    """Make a virtual environment with the same files."""
    for name in FILES[variant]:
        path = prefix / "lib" / "python3.11" / "site-packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return prefix


@dataclass(frozen=True, kw_only=True)
class Scale(Buildah):
    """buildah that records what it is asked to build, and reports given sizes for images that were never
    built.
    """

    storage: Path = Path("nowhere")
    sizes: Mapping[str, int] = field(default_factory=dict)
    asked: list[Mapping[str, str]] = field(default_factory=list)

    def build(
        self, dockerfile: Path, context: Path, tag: str, arguments: Mapping[str, str], *, offline: bool
    ) -> None:
        assert dockerfile.is_file()
        assert context.is_dir()
        assert tag == TAG
        self.asked.append(arguments)

    def size_bytes(self, tag: str) -> int:
        return self.sizes[tag]


@pytest.mark.unit
@VARIANTS
def test_a_variant_is_recognised_by_its_libraries(variant: Torch, tmp_path: Path) -> None:
    """The version does not tell the variant: indexes leave out or respell the part after the plus."""
    assert torch_of(FILES[variant]) is variant
    assert torch_in_wheels(wheels(tmp_path, variant)) is variant
    assert torch_in_environment(environment(tmp_path / "env", variant)) is variant


@pytest.mark.unit
def test_the_torch_that_runs_here_is_recognised() -> None:
    expected = Torch.CUDA if torch.version.cuda else Torch.CPU
    assert torch_in_environment(Path(sys.prefix)) is expected


@pytest.mark.unit
def test_a_library_of_another_package_is_no_torch() -> None:
    assert torch_of(("mine/lib/libtorch_cuda.so", "torch/lib/libtorch_cpu.so")) is Torch.CPU


@pytest.mark.unit
@pytest.mark.parametrize(("library", "platform"), [("libtorch_hip.so", "ROCm"), ("libtorch_xpu.so", "XPU")])
def test_a_torch_for_something_else_is_refused(library: str, platform: str) -> None:
    with pytest.raises(TorchError, match=platform):
        torch_of(("torch/lib/libtorch_cpu.so", f"torch/lib/{library}"))


@pytest.mark.unit
def test_two_wheels_of_torch_are_refused(tmp_path: Path) -> None:
    wheels(tmp_path, Torch.CPU, "9.9+cpu")
    with pytest.raises(ImageError, match=r"more than one torch \(torch-9\.9\+cpu.*, torch-9\.9-"):
        torch_among(wheels(tmp_path, Torch.CUDA))


@pytest.mark.unit
def test_production_gets_cuda_unless_otherwise_requested() -> None:
    assert RUNTIME.torch(None) is Torch.CUDA
    assert RUNTIME.torch(Torch.CPU) is Torch.CPU
    assert OPERATOR.torch(None) is Torch.NONE


@pytest.mark.unit
def test_the_operator_has_no_torch_to_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "operator", "--torch", "cpu"]) == 1
    assert "leave out --torch cpu" in capsys.readouterr().err


@pytest.mark.unit
@pytest.mark.parametrize("wanted", [Torch.CPU, Torch.CUDA])
def test_wheels_with_the_other_torch_are_refused_before_the_build(wanted: Torch, tmp_path: Path) -> None:
    tool, other = Scale(), Torch.CPU if wanted is Torch.CUDA else Torch.CUDA
    collected = wheels(tmp_path, other)
    with pytest.raises(ImageError) as caught:
        build_image(tool, RUNTIME, wanted, tag=TAG, base=BASE, wheels=collected)
    assert tool.asked == []
    for word in (str(tmp_path), "CUDA", "CPUs", "PIP_INDEX_URL", "--torch"):
        assert word in str(caught.value)


@pytest.mark.unit
@VARIANTS
def test_the_build_gets_the_variant(variant: Torch, tmp_path: Path) -> None:
    tool, image = Scale(), OPERATOR if variant is Torch.NONE else RUNTIME
    build_image(tool, image, variant, tag=TAG, base=BASE, wheels=wheels(tmp_path, variant))
    build_image(tool, image, variant, tag=TAG, base=BASE, wheels=None)
    given = [arguments.get("TORCH") for arguments in tool.asked]
    assert given == [None if variant is Torch.NONE else variant.value] * 2


@pytest.mark.unit
@pytest.mark.parametrize("wanted", ["cpu", "cuda", "none"])
@VARIANTS
def test_the_build_stage_refuses_the_other_torch(
    wanted: str, variant: Torch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = environment(tmp_path, variant)
    assert check([str(prefix), wanted]) == (0 if variant == wanted else 1)
    message = capsys.readouterr().err
    assert message == "" if variant == wanted else f"{prefix} holds" in message


@pytest.mark.unit
def test_the_build_stage_refuses_a_word_that_is_no_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check([str(environment(tmp_path, Torch.CUDA)), "gpu"]) == 1
    assert "TORCH=gpu is none of none, cpu, cuda" in capsys.readouterr().err


@pytest.mark.unit
@pytest.mark.parametrize("image", IMAGES.values(), ids=list(IMAGES))
def test_an_image_is_checked_against_the_budget_of_its_variant(
    image: Image, capsys: pytest.CaptureFixture[str]
) -> None:
    for variant, budget in image.budgets.items():
        sizes = {BASE: 100_000_000, TAG: 100_000_000 + budget}
        check_size(Scale(sizes=sizes), image, variant, tag=TAG, base=BASE)
        assert f"budget {budget / 1e6:,.0f} MB, torch: {variant}" in capsys.readouterr().out
        sizes[TAG] += 12_000_000
        with pytest.raises(ImageError, match=rf"12 MB more than it may .*torch: {variant}"):
            check_size(Scale(sizes=sizes), image, variant, tag=TAG, base=BASE)


@pytest.mark.unit
def test_a_torch_for_cuda_may_weigh_more() -> None:
    assert RUNTIME.budgets[Torch.CPU] < RUNTIME.budgets[Torch.CUDA]


@pytest.mark.unit
def test_without_its_base_nothing_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    check_size(Scale(sizes={TAG: 10**12}), RUNTIME, Torch.CPU, tag=TAG, base=None)
    assert "not checked without --base" in capsys.readouterr().out


@pytest.mark.ranks
@pytest.mark.parametrize("setting", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"])
def test_another_place_for_wheels_collects_them_anew(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant that was collected first would otherwise stay."""
    before = wheels_key(RUNTIME)
    assert wheels_key(RUNTIME) == before
    monkeypatch.setenv(setting, "/somewhere/else")
    assert wheels_key(RUNTIME) != before
