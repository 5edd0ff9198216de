"""What the spill's metrics rest on: the probe of the drive, the space of its volumes, the faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.vaults import CHUNK, all_tiles, filled, flip, make_vault, rewrite
from zerotrain.runtime.metrics import RankIdentity, WorkerMetrics
from zerotrain.runtime.train.measuring import set_offload
from zerotrain.runtime.vault.errors import SpillIOError
from zerotrain.runtime.vault.probe import probe, space
from zerotrain.runtime.vault.seal import SpillIntegrityError


@pytest.mark.unit
@pytest.mark.parametrize("encryption", ["AEAD", "None"])
def test_a_probe_changes_nothing_and_is_counted_apart(encryption: str, tmp_path: Path) -> None:
    vault = make_vault(tmp_path, encryption=encryption)
    pairs = filled(vault, 64 * 2, 10)
    before = vault.totals.num_bytes
    rate = probe(vault)
    num_bytes = sum(record.num_bytes for record, _ in pairs)
    assert rate == pytest.approx(vault.probed.num_bytes / vault.probed.total_s)
    assert (vault.probed.bytes_read, vault.probed.bytes_written) == (num_bytes, num_bytes)
    assert vault.totals.num_bytes - before == 2 * num_bytes
    for record, data in pairs:
        assert torch.equal(vault.read_chunks(record), data)
    vault.close()


@pytest.mark.unit
def test_a_probe_is_bounded_and_leaves_out_what_no_pass_touches(tmp_path: Path) -> None:
    vault = make_vault(tmp_path)
    filled(vault, 64 * 4)
    probe(vault, max_bytes=64 * CHUNK + 1)
    assert vault.probed.bytes_read <= 2 * 64 * CHUNK
    whole = make_vault(tmp_path)
    whole.add("weights", [CHUNK], swept=False)
    whole.allocate()
    assert probe(whole) is None
    for each in (vault, whole):
        each.close()


@pytest.mark.unit
def test_folders_of_one_volume_count_once(tmp_path: Path) -> None:
    vault = make_vault(tmp_path / "a", tmp_path / "b")
    vault.add("unit", [CHUNK])
    vault.allocate()
    stat = os.statvfs(tmp_path)
    found = space(vault)
    assert found.capacity == stat.f_blocks * stat.f_frsize
    assert 0 < found.free <= found.capacity
    (tmp_path / "b").rmdir()  # the open file needs no folder
    assert space(vault).capacity == found.capacity
    vault.close()


@pytest.mark.unit
def test_faults_are_counted_also_after_the_last_one(tmp_path: Path) -> None:
    vault = make_vault(tmp_path)
    pairs = filled(vault, 64 * 2)
    with vault.sweep(all_tiles(pairs), writes=True) as sweep:
        for tile in sweep:
            if tile.ref.first == 64:
                tile.data[CHUNK * 9 + 1] ^= 4  # on its way: the second read passes
            tile.open()
            tile.seal()
    assert vault.faults.auth_failures == 1
    flip(vault, pairs[0][0].offset + 5)
    with pytest.raises(SpillIntegrityError):
        rewrite(vault, all_tiles(pairs))
    assert (vault.faults.auth_failures, vault.faults.io_errors) == (3, 0)
    vault.close()


@pytest.mark.unit
def test_a_refused_read_is_counted(tmp_path: Path) -> None:
    vault = make_vault(tmp_path)
    pairs = filled(vault, 64 * 2)
    os.truncate(f"/proc/self/fd/{vault.file.fileno()}", 4096)
    with pytest.raises(SpillIOError):
        rewrite(vault, all_tiles(pairs))
    assert vault.faults.auth_failures == 0
    assert 1 <= vault.faults.io_errors <= 2, "those that were under way"
    vault.close()


def told_after_a_fault(folder: str) -> dict[str, float | None]:
    """What the metrics say of an engine whose spill file was damaged under it."""
    import zerotrain.runtime as zt

    block = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": folder, "just_in_time": False}}
    file = {"train_batch_size": 1, "bf16": {"enabled": True, "auto_cast": True}, "zero_optimization": block}
    engine, *_ = zt.initialize(model=torch.nn.Linear(128, 64, bias=False), config=file)
    filled = engine.offload_totals()
    assert engine.probe_spill() is not None
    assert engine.offload_totals() == filled, "the probe is no part of the training"
    vault = engine.core.options.vault
    assert vault is not None
    flip(vault, 5)
    engine.backward(engine(torch.ones(1, 128)).float().mean())
    with pytest.raises(SpillIntegrityError):
        engine.step()
    metrics = WorkerMetrics(RankIdentity(job="gpt", rank=0, attempt=1))
    set_offload(metrics, engine)
    read, common = metrics.registry.get_sample_value, {"job_name": "gpt", "rank": "0"}
    return {name: read(f"zerotrain_spill_{name}_total", common) for name in ("auth_failures", "io_errors")}


@pytest.mark.ranks
def test_a_spill_that_was_lost_is_still_told_about(tmp_path: Path) -> None:
    (found,) = run_ranks(1, told_after_a_fault, str(tmp_path))
    assert found == {"auth_failures": 2, "io_errors": 0}
