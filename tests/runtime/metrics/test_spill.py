"""Sources of the spill's metrics: the probe of the drive, the free space of its volumes, the faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.spill_stores import CHUNK, all_tiles, filled, flip, make_spill_store, rewrite
from zerotrain.runtime.metrics import RankIdentity, WorkerMetrics
from zerotrain.runtime.spill.errors import SpillIOError
from zerotrain.runtime.spill.probe import probe, space
from zerotrain.runtime.spill.seal import SpillIntegrityError
from zerotrain.runtime.train.measuring import set_offload


@pytest.mark.unit
@pytest.mark.parametrize("encryption", ["AEAD", "None"])
def test_a_probe_changes_nothing_and_is_counted_apart(encryption: str, tmp_path: Path) -> None:
    spill_store = make_spill_store(tmp_path, encryption=encryption)
    pairs = filled(spill_store, 64 * 2, 10)
    before = spill_store.totals.num_bytes
    rate = probe(spill_store)
    num_bytes = sum(record.num_bytes for record, _ in pairs)
    assert rate == pytest.approx(spill_store.probed.num_bytes / spill_store.probed.total_s)
    assert (spill_store.probed.bytes_read, spill_store.probed.bytes_written) == (num_bytes, num_bytes)
    assert spill_store.totals.num_bytes - before == 2 * num_bytes
    for record, data in pairs:
        assert torch.equal(spill_store.read_chunks(record), data)
    spill_store.close()


@pytest.mark.unit
def test_a_probe_is_bounded_and_leaves_out_what_no_pass_touches(tmp_path: Path) -> None:
    spill_store = make_spill_store(tmp_path)
    filled(spill_store, 64 * 4)
    probe(spill_store, max_bytes=64 * CHUNK + 1)
    assert spill_store.probed.bytes_read <= 2 * 64 * CHUNK
    whole = make_spill_store(tmp_path)
    whole.add("weights", [CHUNK], swept=False)
    whole.allocate()
    assert probe(whole) is None
    for each in (spill_store, whole):
        each.close()


@pytest.mark.unit
def test_folders_of_one_volume_count_once(tmp_path: Path) -> None:
    spill_store = make_spill_store(tmp_path / "a", tmp_path / "b")
    spill_store.add("unit", [CHUNK])
    spill_store.allocate()
    stat = os.statvfs(tmp_path)
    found = space(spill_store)
    assert found.capacity == stat.f_blocks * stat.f_frsize
    assert 0 < found.free <= found.capacity
    (tmp_path / "b").rmdir()  # the open file needs no folder
    assert space(spill_store).capacity == found.capacity
    spill_store.close()


@pytest.mark.unit
def test_faults_are_counted_also_after_the_last_one(tmp_path: Path) -> None:
    spill_store = make_spill_store(tmp_path)
    pairs = filled(spill_store, 64 * 2)
    with spill_store.sweep(all_tiles(pairs), writes=True) as sweep:
        for tile in sweep:
            if tile.ref.first == 64:
                tile.data[CHUNK * 9 + 1] ^= 4  # in flight: the second read passes
            tile.open()
            tile.seal()
    assert spill_store.faults.auth_failures == 1
    flip(spill_store, pairs[0][0].offset + 5)
    with pytest.raises(SpillIntegrityError):
        rewrite(spill_store, all_tiles(pairs))
    assert (spill_store.faults.auth_failures, spill_store.faults.io_errors) == (3, 0)
    spill_store.close()


@pytest.mark.unit
def test_a_refused_read_is_counted(tmp_path: Path) -> None:
    spill_store = make_spill_store(tmp_path)
    pairs = filled(spill_store, 64 * 2)
    os.truncate(f"/proc/self/fd/{spill_store.file.fileno()}", 4096)
    with pytest.raises(SpillIOError):
        rewrite(spill_store, all_tiles(pairs))
    assert spill_store.faults.auth_failures == 0
    assert 1 <= spill_store.faults.io_errors <= 2, "those that were under way"
    spill_store.close()


def faults_after_damage(folder: str) -> dict[str, float | None]:
    """Return the metrics of an engine whose spill file was damaged."""
    import zerotrain.runtime as zt

    block = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": folder, "just_in_time": False}}
    file = {"train_batch_size": 1, "bf16": {"enabled": True, "auto_cast": True}, "zero_optimization": block}
    engine, *_ = zt.initialize(model=torch.nn.Linear(128, 64, bias=False), config=file)
    filled = engine.offload_totals()
    assert engine.probe_spill() is not None
    assert engine.offload_totals() == filled, "the probe is no part of the training"
    spill_store = engine.core.options.spill_store
    assert spill_store is not None
    flip(spill_store, 5)
    engine.backward(engine(torch.ones(1, 128)).float().mean())
    with pytest.raises(SpillIntegrityError):
        engine.step()
    metrics = WorkerMetrics(RankIdentity(job="gpt", rank=0, attempt=1))
    set_offload(metrics, engine)
    read, common = metrics.registry.get_sample_value, {"job_name": "gpt", "rank": "0"}
    return {name: read(f"zerotrain_spill_{name}_total", common) for name in ("auth_failures", "io_errors")}


@pytest.mark.ranks
def test_a_spill_that_was_lost_is_still_reported(tmp_path: Path) -> None:
    (found,) = run_ranks(1, faults_after_damage, str(tmp_path))
    assert found == {"auth_failures": 2, "io_errors": 0}
