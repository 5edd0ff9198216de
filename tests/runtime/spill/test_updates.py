"""A step inside the spill store updates every element once, also where a chunk has to be read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.spill_stores import flip, make_spill_store
from zerotrain.runtime._native import Segment, UpdateTask, update_
from zerotrain.runtime.spill.chunks import Record
from zerotrain.runtime.spill.seal import SpillIntegrityError
from zerotrain.runtime.spill.store import SpillStore

pytestmark = pytest.mark.unit


CHUNK_NUMEL = 16_384
NUMEL = CHUNK_NUMEL * 130 + 2048
STREAMS = 3


def widths() -> list[int]:
    """Return the elements of each chunk."""
    return [min(CHUNK_NUMEL, NUMEL - start) for start in range(0, NUMEL, CHUNK_NUMEL)]


def to_chunks(streams: list[torch.Tensor]) -> torch.Tensor:
    """Return [master | first | second] chunk by chunk, as bytes."""
    cuts = [torch.split(stream, widths()) for stream in streams]
    return torch.cat([part for parts in zip(*cuts, strict=True) for part in parts]).view(torch.uint8)


def task_of(grad: torch.Tensor, step: int) -> UpdateTask:
    segments = [
        Segment(0, 5000, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=step),
        Segment(5000, NUMEL, lr=3e-3, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.0, step=step),
    ]
    return UpdateTask("adamw", segments, grad, grad_scale=0.5)


def start(folder: Path, encryption: str) -> tuple[SpillStore, Record, list[torch.Tensor], torch.Tensor]:
    """Return a spill store that holds the streams, its record, the streams themselves, and a gradient."""
    spill_store = make_spill_store(folder, encryption=encryption)
    record = spill_store.add("unit", [count * 4 * STREAMS for count in widths()], layout="f32,f32,f32")
    spill_store.allocate()
    streams = [torch.randn(NUMEL), torch.randn(NUMEL), torch.rand(NUMEL)]
    spill_store.write_chunks(record, 0, None, to_chunks(streams))
    return spill_store, record, streams, torch.randn(NUMEL)


def update_all(spill_store: SpillStore, record: Record, task: UpdateTask) -> None:
    with spill_store.sweep(record.tiles(), writes=True) as sweep:
        for tile in sweep:
            tile.update(task)


@pytest.mark.parametrize("encryption", ["None", "AEAD"])
def test_steps_in_the_spill_store_equal_steps_in_memory(tmp_path: Path, encryption: str) -> None:
    """Bit for bit, over several tiles, segments that cross chunks, and a short last chunk."""
    spill_store, record, streams, grad = start(tmp_path, encryption)
    for step in (1, 2, 3):
        task = task_of(grad, step)
        update_(task, streams[0], streams[1:])
        update_all(spill_store, record, task)
    assert torch.equal(spill_store.read_chunks(record), to_chunks(streams))
    spill_store.close()


def test_chunks_that_went_wrong_on_their_way_are_read_again_and_updated_once(tmp_path: Path) -> None:
    """Three chunks of two tiles are wrong; all others of these tiles are not updated a second time."""
    spill_store, record, streams, grad = start(tmp_path, "AEAD")
    task = task_of(grad, 1)
    update_(task, streams[0], streams[1:])
    with spill_store.sweep(record.tiles(), writes=True) as sweep:
        for tile in sweep:
            for chunk in {0: (0, 63), 64: (70,), 128: ()}[tile.ref.first]:
                tile.data[tile.ref.inner(chunk).start + 77] ^= 1
            tile.update(task)
    assert spill_store.memory.rereads == 3
    assert torch.equal(spill_store.read_chunks(record), to_chunks(streams))
    spill_store.close()


def test_a_chunk_that_is_wrong_on_the_drive_ends_the_step(tmp_path: Path) -> None:
    """The step ends after one more read; nothing of its tile is written."""
    spill_store, record, _, grad = start(tmp_path, "AEAD")
    flip(spill_store, record.offset + record.starts[65] + 9)
    written = spill_store.totals.bytes_written
    with pytest.raises(SpillIntegrityError, match="chunk 65 of unit 'unit'"):
        update_all(spill_store, record, task_of(grad, 1))
    assert spill_store.totals.bytes_written - written == record.starts[64]
    with pytest.raises(SpillIntegrityError) as caught:
        spill_store.read_chunks(record)
    assert (caught.value.unit, caught.value.chunk, caught.value.rank) == ("unit", 65, 3)
    spill_store.close()
