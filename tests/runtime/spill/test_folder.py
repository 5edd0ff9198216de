"""The spill of a job with an NVMe volume is on it, whatever links and mounts its folders lead through."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotrain.contract.config import ConfigError, load, resolve
from zerotrain.runtime.offload.spill import spill_settings

pytestmark = pytest.mark.unit


def folders(volume: Path | None, *paths: Path | str) -> tuple[Path, ...]:
    """Return the folders to which rank 0 would spill with these `spill.paths`."""
    zero = {
        "stage": 1,
        "offload_optimizer": {"device": "nvme"},
        **({"spill": {"paths": [str(path) for path in paths]}} if paths else {}),
    }
    config = resolve(load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}), world_size=1)
    environ = {"ZEROTRAIN_NVME_PATH": str(volume), "ZEROTRAIN_NVME_VOLUME": str(volume)} if volume else {}
    settings = spill_settings(config, environ, world_size=1)
    assert settings is not None
    return settings.folders


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (tmp_path / "nvme/inner").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "nvme"


def test_folders_of_the_volume_are_taken_without_their_links(volume: Path) -> None:
    (volume / "link").symlink_to(volume / "inner")
    assert folders(volume) == (volume,)
    given = (volume, volume / "link", volume / "inner/../new/deeper")
    assert folders(volume, *given) == (volume, volume / "inner", volume / "new/deeper")


def test_the_volume_itself_may_be_behind_a_link(volume: Path, tmp_path: Path) -> None:
    (tmp_path / "mounted").symlink_to(volume)
    assert folders(tmp_path / "mounted", tmp_path / "mounted/inner") == (volume / "inner",)


@pytest.mark.parametrize(
    "given", ["../elsewhere", "link", "link/new", "chain", "inner/../../elsewhere", "/tmp"]
)
def test_a_folder_that_leads_out_is_refused(volume: Path, given: str) -> None:
    (volume / "link").symlink_to(volume.parent / "elsewhere")
    (volume / "chain").symlink_to("link")
    with pytest.raises(
        ConfigError, match=r"spill.paths: must name folders on the job's NVMe volume"
    ) as caught:
        folders(volume, volume / given)
    assert str(volume) in str(caught.value)


def test_another_file_system_below_the_volume_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no other mount leads out of"):
        folders(Path("/"), "/proc")


def test_without_a_volume_of_the_job_any_folder_will_do(volume: Path) -> None:
    (volume / "link").symlink_to(volume.parent / "elsewhere")
    assert folders(None, volume / "link") == (volume / "link",)
