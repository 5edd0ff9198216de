"""Sealed chunks: which ones open, which errors name the others, and that no nonce is used twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.support.chunks import (
    BACKENDS,
    CHUNK,
    IDENTITY,
    KEY,
    NUM_CHUNKS,
    KeyedSealer,
    batch_of,
    copy_of,
    sealed,
    sizes,
)
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.spill.seal import (
    ChunkBatch,
    Encryption,
    PlainSealer,
    SealedRecord,
    Sealer,
    SpillIdentity,
    SpillIntegrityError,
)
from zerotrain.runtime.spill.sealers import create_sealer


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest) -> KeyedSealer:
    """Return the function that makes sealers of one backend."""
    return BACKENDS[request.param]


@pytest.fixture
def sealer(make: KeyedSealer) -> Iterator[Sealer]:
    """Provide a sealer with a random key."""
    made = make(IDENTITY)
    yield made
    made.close()


@pytest.mark.unit
def test_what_was_sealed_opens_and_is_unlike_before(sealer: Sealer) -> None:
    chunks, plain = sealed(sealer)
    assert (chunks.data == plain).float().mean() < 0.02
    sealer.open(chunks)
    assert torch.equal(chunks.data, plain)


@pytest.mark.unit
def test_parts_of_a_record_are_sealed_and_opened_alone(sealer: Sealer) -> None:
    record = sealer.add("block.0", sizes())
    whole = batch_of(record)
    plain = whole.data.clone()
    for first, count in ((4, 2), (0, 1), (1, 3)):
        part = _part(whole, first, count)
        sealer.seal(part)
    sealer.open(_part(whole, 2, 4))
    sealer.open(_part(whole, 0, 2))
    assert torch.equal(whole.data, plain)


Damage = Callable[[ChunkBatch], None]


def _flip(index: int) -> Damage:
    def flip(chunks: ChunkBatch) -> None:
        chunks.data[index] ^= 1

    return flip


def _swap(chunks: ChunkBatch) -> None:
    first, second = chunks.data[:CHUNK].clone(), chunks.data[CHUNK : 2 * CHUNK].clone()
    chunks.data[:CHUNK], chunks.data[CHUNK : 2 * CHUNK] = second, first


def _truncate(chunks: ChunkBatch) -> None:
    chunks.data[3 * CHUNK + 4096 :] = 0


def _table(index: int) -> Damage:
    def change(chunks: ChunkBatch) -> None:
        chunks.record.table[index] ^= 1

    return change


@pytest.mark.unit
@pytest.mark.parametrize(
    ("damage", "failed"),
    [
        pytest.param(_flip(0), [0], id="first-bit"),
        pytest.param(_flip(-1), [5], id="last-bit"),
        pytest.param(_flip(2 * CHUNK + 77), [2], id="a-bit-in-the-middle"),
        pytest.param(_swap, [0, 1], id="swapped"),
        pytest.param(_truncate, [3, 4, 5], id="truncated"),
        pytest.param(_table(16 * 4), [4], id="tag"),
        pytest.param(_table(16 * 6 + 8 * 1), [1], id="counter"),
        pytest.param(_table(24 * 6 + 4 * 3 + 1), [3], id="generation"),
    ],
)
def test_damage_is_refused_by_name(sealer: Sealer, damage: Damage, failed: list[int]) -> None:
    chunks, plain = sealed(sealer)
    damage(chunks)
    with pytest.raises(SpillIntegrityError) as caught:
        sealer.open(chunks)
    error = caught.value
    assert error.exit_code is ExitCode.SPILL_INTEGRITY
    assert list(error.failed) == failed
    assert (error.unit, error.rank, error.chunk) == ("block.0", 3, failed[0])
    assert error.file_offset == (1 << 20) + failed[0] * CHUNK
    for fact in (f"offset {error.file_offset}", "rank 3", "'block.0'", f"chunk {failed[0]} "):
        assert fact in str(error)
    for chunk in range(NUM_CHUNKS):
        stop = None if chunk == NUM_CHUNKS - 1 else (chunk + 1) * CHUNK
        found, expected = chunks.data[chunk * CHUNK : stop], plain[chunk * CHUNK : stop]
        assert torch.equal(found, torch.zeros_like(found) if chunk in failed else expected), chunk


@pytest.mark.unit
def test_an_older_generation_is_refused(sealer: Sealer) -> None:
    chunks, plain = sealed(sealer)
    old = copy_of(chunks)
    chunks.data.copy_(plain)
    sealer.seal(_part(chunks, 1, 1))
    chunks.data[:CHUNK] = old.data[:CHUNK]
    chunks.data[2 * CHUNK :] = old.data[2 * CHUNK :]
    with pytest.raises(SpillIntegrityError) as caught:
        sealer.open(old)
    assert list(caught.value.failed) == [1]
    sealer.open(chunks)
    assert torch.equal(chunks.data, plain)


@pytest.mark.unit
def test_another_generation_is_refused_even_with_the_nonce_and_tag_of_the_bytes(sealer: Sealer) -> None:
    chunks, _ = sealed(sealer)
    assert bytes(chunks.record.table[24 * 6 :]) == b"\x01\0\0\0" * 6
    chunks.record.table[24 * 6] = 2
    with pytest.raises(SpillIntegrityError):
        sealer.open(chunks)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("identity", "unit", "layout"),
    [
        pytest.param(replace(IDENTITY, job="job-2"), "block.0", "f32,f32,f32", id="job"),
        pytest.param(replace(IDENTITY, rank=4), "block.0", "f32,f32,f32", id="rank"),
        pytest.param(replace(IDENTITY, world_size=7), "block.0", "f32,f32,f32", id="world-size"),
        pytest.param(IDENTITY, "block.1", "f32,f32,f32", id="unit"),
        pytest.param(IDENTITY, "block.0", "i16,f32,f32", id="layout"),
    ],
)
def test_bytes_of_another_place_are_refused_under_the_same_key(
    make: KeyedSealer, identity: SpillIdentity, unit: str, layout: str
) -> None:
    chunks, _ = sealed(make(IDENTITY, key=KEY))
    other = make(identity, key=KEY)
    record = other.add(unit, sizes(), layout=layout)
    record.table[:] = chunks.record.table
    with pytest.raises(SpillIntegrityError):
        other.open(replace(chunks, record=record))


@pytest.mark.unit
def test_another_key_opens_nothing(make: KeyedSealer) -> None:
    chunks, _ = sealed(make(IDENTITY))
    other = make(IDENTITY)
    record = other.add("block.0", sizes(), layout="f32,f32,f32")
    record.table[:] = chunks.record.table
    with pytest.raises(SpillIntegrityError) as caught:
        other.open(replace(chunks, record=record))
    assert len(caught.value.failed) == NUM_CHUNKS


@pytest.mark.unit
def test_no_nonce_repeats_over_records_generations_and_threads(make: KeyedSealer) -> None:
    sealer = make(IDENTITY)
    seen: set[bytes] = set()

    def seal_often(unit: int) -> list[bytes]:
        record = sealer.add(f"block.{unit}", [4096] * 16)
        chunks, nonces = batch_of(record), []
        for _ in range(40):
            sealer.seal(chunks)
            counters = record.table[16 * 16 : 24 * 16]
            nonces += [record.id.to_bytes(4, "little") + counters[8 * i : 8 * i + 8] for i in range(16)]
        sealer.forget(record)
        return nonces

    with ThreadPoolExecutor(4) as pool:
        for nonces in pool.map(seal_often, range(8)):
            seen.update(nonces)
    assert len(seen) == 8 * 40 * 16
    # Nonces differ even without the record's number.
    assert len({nonce[4:] for nonce in seen}) == len(seen)


@pytest.mark.unit
def test_a_retry_takes_another_nonce(sealer: Sealer) -> None:
    chunks, plain = sealed(sealer)
    first, table = chunks.data.clone(), bytes(chunks.record.table)
    chunks.data.copy_(plain)
    sealer.seal(chunks)
    counters = slice(16 * NUM_CHUNKS, 24 * NUM_CHUNKS)
    assert table[counters] != chunks.record.table[counters]
    assert (first == chunks.data).float().mean() < 0.02


@pytest.mark.unit
def test_the_counter_does_not_wrap(make: KeyedSealer) -> None:
    sealer = make(IDENTITY, first_counter=2**64 - 3)
    record = sealer.add("block.0", [4096])
    sealer.seal(batch_of(record))
    sealer.seal(batch_of(record))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nonce must not repeat"):
            sealer.seal(batch_of(record))


@pytest.mark.unit
def test_a_generation_does_not_wrap(sealer: Sealer) -> None:
    chunks, _ = sealed(sealer)
    chunks.record.table[24 * 6 : 24 * 6 + 4] = b"\xff" * 4
    before = chunks.data.clone()
    with pytest.raises(RuntimeError, match="generation must not repeat"):
        sealer.seal(chunks)
    assert torch.equal(chunks.data, before)


@pytest.mark.unit
@pytest.mark.parametrize("encryption", Encryption)
def test_a_chunk_never_sealed_is_not_opened(encryption: Encryption) -> None:
    sealer = create_sealer(encryption, IDENTITY)
    record = sealer.add("block.0", sizes())
    sealer.seal(batch_of(record, first=0, count=2))
    with pytest.raises(ValueError, match=r"chunk 2 .*never sealed"):
        sealer.open(batch_of(record, first=1, count=2))


@pytest.mark.ranks
def test_a_forked_child_has_no_key(sealer: Sealer) -> None:
    chunks, plain = sealed(sealer)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = b"opened"
        try:
            sealer.open(chunks)
        except RuntimeError as error:
            found = str(error).encode()
        os.write(write_end, found)
        sealer.close()
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert b"forked child has no spill store key" in pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    sealer.open(chunks)
    assert torch.equal(chunks.data, plain)


@pytest.mark.unit
def test_a_closed_sealer_opens_nothing(make: KeyedSealer) -> None:
    sealer = make(IDENTITY)
    chunks, _ = sealed(sealer)
    sealer.close()
    sealer.close()
    with pytest.raises(RuntimeError, match="closed"):
        sealer.open(chunks)
    with pytest.raises(RuntimeError, match="closed"):
        sealer.seal(chunks)


@pytest.mark.unit
def test_the_table_takes_28_bytes_per_chunk_and_none_once_forgotten(sealer: Sealer) -> None:
    first, second = sealer.add("a", sizes()), sealer.add("b", [4096] * 100)
    assert sealer.table_bytes == 28 * (NUM_CHUNKS + 100)
    sealer.forget(second)
    assert sealer.table_bytes == 28 * NUM_CHUNKS
    third = sealer.add("b", [4096])
    assert len({first.id, second.id, third.id}) == 3


@pytest.mark.unit
@pytest.mark.parametrize("wrong", [[], [4096, 8192], [8192, 4096, 8192], [0]])
def test_sizes_that_are_not_a_records_are_refused(sealer: Sealer, wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="must have one size"):
        sealer.add("a", wrong)


@pytest.mark.unit
def test_data_that_is_not_the_chunks_is_refused(sealer: Sealer) -> None:
    record = sealer.add("a", sizes())
    chunks = batch_of(record)
    with pytest.raises(ValueError, match="contiguous bytes"):
        sealer.seal(replace(chunks, count=3))
    with pytest.raises(ValueError, match="the record has 6"):
        sealer.seal(replace(chunks, first=1))


@pytest.mark.unit
def test_plain_chunks_must_be_asked_for_by_name() -> None:
    assert isinstance(create_sealer(Encryption("None"), IDENTITY), PlainSealer)
    assert create_sealer(Encryption("AEAD"), IDENTITY).info.is_encrypted
    for other in ("none", "", None):
        with pytest.raises(ValueError, match="is not a valid Encryption"):
            Encryption(other)


@pytest.mark.unit
def test_plain_chunks_stay_as_they_are_and_say_so() -> None:
    sealer = PlainSealer(IDENTITY)
    chunks, plain = sealed(sealer)
    assert torch.equal(chunks.data, plain)
    sealer.open(chunks)
    assert torch.equal(chunks.data, plain)
    assert not sealer.info.is_encrypted
    assert sealer.table_bytes == NUM_CHUNKS


@pytest.mark.unit
def test_the_library_is_chosen_by_name() -> None:
    identity = SpillIdentity(job="j", rank=0, world_size=1)
    wheel = create_sealer(Encryption.AEAD, identity, environ={"ZEROTRAIN_SPILL_CRYPTO": "cryptography"})
    assert wheel.info.backend.startswith("cryptography ")
    assert wheel.info.name == "AES-256-GCM"
    if "openssl" in BACKENDS:
        native = create_sealer(Encryption.AEAD, identity, environ={})
        assert native.info.backend.startswith("OpenSSL ")
    with pytest.raises(ValueError, match="ZEROTRAIN_SPILL_CRYPTO must be"):
        create_sealer(Encryption.AEAD, identity, environ={"ZEROTRAIN_SPILL_CRYPTO": "libsodium"})


def _part(chunks: ChunkBatch, first: int, count: int) -> ChunkBatch:
    record: SealedRecord = chunks.record
    start = first * record.chunk_bytes
    return replace(
        chunks,
        first=first,
        count=count,
        data=chunks.data[start : start + record.bytes_of(first, count)],
        file_offset=chunks.file_offset + start,
    )
