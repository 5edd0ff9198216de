"""A DeepSpeed file takes memory by its own size: anything that would grow on reading is refused first."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from tests.support import deepspeed_files
from zerotrain.runtime.checkpoint import CheckpointError
from zerotrain.runtime.checkpoint.from_deepspeed.__main__ import SPARE_BYTES
from zerotrain.runtime.checkpoint.from_deepspeed.pickles import UnsafeCheckpoint, load_file, plain
from zerotrain.runtime.checkpoint.from_deepspeed.spawn import import_checkpoint

pytestmark = pytest.mark.ranks

GIB = 1 << 30


def members(**content: object) -> dict[str, bytes]:
    """Return the members of a torch file."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def written(path: Path, parts: dict[str, bytes], *, packed: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            kind = zipfile.ZIP_DEFLATED if packed and name.endswith(packed) else zipfile.ZIP_STORED
            archive.writestr(name, data, compress_type=kind)
    return path


@pytest.mark.parametrize("packed", ["data.pkl", "data/0", "version"])
def test_compressed_members_are_refused_before_they_are_read(packed: str, tmp_path: Path) -> None:
    parts = members(module={"a": torch.zeros(100_000)})
    path = written(tmp_path / "t.pt", parts, packed=packed)
    with pytest.raises(UnsafeCheckpoint, match="compressed"):
        load_file(path)
    assert load_file(written(tmp_path / "u.pt", parts))["module"]["a"].numel() == 100_000


def test_members_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    parts = members(module={"a": torch.zeros(100_000)})
    path = written(tmp_path / "t.pt", parts)
    with zipfile.ZipFile(path, "a") as archive:
        [info] = [item for item in archive.infolist() if item.filename.endswith("data/0")]
        archive.filelist += [info] * 50
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(UnsafeCheckpoint, match="claims"):
        load_file(path)


def test_a_pickle_that_asks_for_memory_ends_the_import_and_not_the_rank(tmp_path: Path) -> None:
    """The unpickler makes byte arrays of any named size.

    Here the size is less than a machine has, and more than the files can need.
    """
    source = deepspeed_files.write(tmp_path / "ds", stage=1, world_size=1)
    model = next(source.rglob("*model_states.pt"))
    parts = members(module={})
    [name] = [name for name in parts if name.endswith("data.pkl")]
    asks = (
        b"\x80\x02}X\x01\x00\x00\x00acbuiltins\nbytearray\n\x8a\x06"
        + (SPARE_BYTES + GIB).to_bytes(6, "little")
        + b"\x85Rs."
    )
    written(model, {**parts, name: asks})
    with pytest.raises(CheckpointError, match="times the memory that its files have"):
        import_checkpoint(source, tmp_path / "ours")
    assert not list((tmp_path / "ours").glob("step-*"))


def test_client_state_that_nests_without_end_is_no_plain_data() -> None:
    value: object = 1
    for _ in range(5000):
        value = [value]
    with pytest.raises(TypeError, match="nested more than 48 deep"):
        plain(value)
