"""The real engine's state through N -> M -> N ranks and through the stages: the same bits come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import checkpoint_engines
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import newest_digests
from zerotrain.contract.worker_environment import LaunchSpec
from zerotrain.runtime.checkpoint import CheckpointFenced, Owner
from zerotrain.runtime.checkpoint.fence import read_fence, take_over

pytestmark = pytest.mark.ranks


def test_n_to_m_to_n_is_bit_identical(tmp_path: Path) -> None:
    """Digests cover master weights, both moments, buffers and the random generators of every rank's file."""
    first, resized, back, direct = (str(tmp_path / name) for name in ("n", "m", "back", "direct"))
    run_ranks(2, checkpoint_engines.train_and_save, 2, first, 3)
    assert run_ranks(1, checkpoint_engines.load_and_save, 1, first, resized, 3) == [3]
    assert run_ranks(2, checkpoint_engines.load_and_save, 2, resized, back, 3) == [3, 3]
    # Generators are per rank and rank 1 did not exist during the resize, so compare the rest.
    run_ranks(2, checkpoint_engines.load_and_save, 2, first, direct, 3)
    assert tensors(back) == tensors(direct) == tensors(first)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stage_may_change_between_save_and_load(tmp_path: Path, stage: int) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    run_ranks(2, checkpoint_engines.train_and_save, 2, first, 2)
    run_ranks(2, checkpoint_engines.load_and_save, 2, first, second, stage)
    assert tensors(second) == tensors(first)
    assert newest_digests(Path(second)) == newest_digests(Path(first))


def test_saving_inside_accumulation_is_refused_clearly(tmp_path: Path) -> None:
    texts = run_ranks(2, checkpoint_engines.refusals_inside_accumulation, 2, str(tmp_path / "c"))
    for rank_texts in texts:
        assert len(rank_texts) == 2
        assert all("inside gradient accumulation" in text for text in rank_texts)


def test_first_save_claims_the_folder_and_a_load_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim prevents that an abandoned attempt still commits over its successor's checkpoints."""
    spec = LaunchSpec(
        job="j",
        job_uid="uid-7",
        attempt=2,
        master_addr="localhost",
        world_size=1,
        node_rank=0,
        config_path=tmp_path / "c.json",
        checkpoint_dir=tmp_path / "job",
    )
    for name, value in spec.to_env().items():
        monkeypatch.setenv(name, value)
    engine = checkpoint_engines.make_engine(world_size=1)
    engine.load_checkpoint(tmp_path)
    assert read_fence(tmp_path) is None
    assert read_fence(tmp_path / "job") == Owner(attempt=2, job_uid="uid-7")
    engine.save_checkpoint(tmp_path, "first")
    assert read_fence(tmp_path) == Owner(attempt=2, job_uid="uid-7")
    take_over(tmp_path, Owner(attempt=3, job_uid="uid-7"))
    with pytest.raises(CheckpointFenced):
        engine.save_checkpoint(tmp_path, "second")
    engine.close()


def tensors(folder: str) -> dict[str, bytes]:
    """Return every stored state of the newest checkpoint by rank file and key, without generators."""
    from safetensors.numpy import load_file

    (step,) = Path(folder).glob("step-*")
    return {
        f"{path.name}:{key}": value.tobytes()
        for path in sorted(step.glob("*.safetensors"))
        for key, value in load_file(path).items()
        if not key.startswith("rng/")
    }
