"""The sealer on the `cryptography` package: the same bytes as `OpenSslSealer`, for builds without OpenSSL.

Chosen by `sealers.create_sealer`, also where `ZEROTRAIN_SPILL_CRYPTO=cryptography` asks for it. It uses
Python's threads: the package computes without the GIL.
"""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import pairwise
from threading import Lock, local

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.backends.openssl.backend import backend
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from zerotrain.runtime._native import (
    SpillKey,
    UpdateTask,
    check_update,
    clear_vector_registers,
    key_memory,
    num_threads,
    update_chunks,
)
from zerotrain.runtime.spill.seal import (
    TILE_CHUNKS,
    ChunkBatch,
    Sealer,
    SealerInfo,
    SpillIdentity,
    SpillIntegrityError,
    chunk_cut,
    native_chunks,
)

TAG_SIZE, COUNTER_SIZE, GENERATION_SIZE = 16, 8, 4
MAX_COUNTER = 2**64 - 1
MAX_GENERATION = 2**32 - 1


class CryptographySealer(Sealer):
    """A sealer with a key in guarded memory; what the package derives from it lives for one batch. See
    `Sealer`."""

    def __init__(self, identity: SpillIdentity, *, key: bytes | None = None, first_counter: int = 0) -> None:
        """Make the key. `key` and `first_counter` are for tests: the spill store never gives them, and the
        key is then random."""
        super().__init__(identity)
        self._key = SpillKey(key)
        self._counter = first_counter
        self._counter_lock = Lock()
        self._staging = local()
        self._pool = ThreadPoolExecutor(num_threads(), thread_name_prefix="zerotrain-spill-crypto")

    @property
    def info(self) -> SealerInfo:
        """Present state of the encryption."""
        return SealerInfo(
            name="AES-256-GCM",
            backend=f"cryptography {version('cryptography')} ({backend.openssl_version_text()})",
            is_encrypted=True,
            memory=f"key: {key_memory()}; cipher contexts in ordinary memory, made for a batch "
            "and cleansed after it",
        )

    def seal(self, chunks: ChunkBatch) -> None:
        """Seal chunks as `Sealer.seal`. Raises RuntimeError once closed, and in a forked child."""
        places = _Places(chunks)
        places.check(opens=False, seals=True)
        cipher = AESGCM(self._key.view())
        list(self._pool.map(lambda chunk: self._seal_chunk(cipher, places, chunk), places.indices))

    def open(self, chunks: ChunkBatch) -> None:
        """Open chunks as `Sealer.open`. Raises RuntimeError once closed, and in a forked child."""
        places = _Places(chunks)
        places.check(opens=True, seals=False)
        failed = self._open_all(places)
        if failed:
            raise SpillIntegrityError(chunks, failed, rank=self.identity.rank)

    def update(self, chunks: ChunkBatch, task: UpdateTask, *, origin: int = 0) -> None:
        """Update chunks as `Sealer.update`, in passes of their own to open, update and seal: the package does
        not do the arithmetic."""
        places = _Places(chunks)
        places.check(opens=True, seals=True)
        check_update(native_chunks(chunks), task, **chunk_cut(chunks, origin))
        failed = self._open_all(places)
        # Runs of chunks between those that failed are updated as batches of their own.
        for before, after in pairwise([chunks.first - 1, *failed, chunks.first + chunks.count]):
            if after - before > 1:
                run = places.run(before + 1, after)
                update_chunks(native_chunks(run), task, **chunk_cut(run, origin))
                self.seal(run)
        if failed:
            raise SpillIntegrityError(chunks, failed, rank=self.identity.rank)

    def close(self) -> None:
        """Wipe the key."""
        self._key.wipe()
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _open_all(self, places: _Places) -> list[int]:
        """Open all chunks; return the indices in the record of those that failed, which are zeroed."""
        cipher = AESGCM(self._key.view())
        genuine = self._pool.map(lambda chunk: self._open_chunk(cipher, places, chunk), places.indices)
        return [chunk for chunk, good in zip(places.indices, genuine, strict=True) if not good]

    def _seal_chunk(self, cipher: AESGCM, places: _Places, chunk: int) -> None:
        data, counter = places.data(chunk), self._next_counter()
        generation = places.generation(chunk) + 1
        staging = self._buffer(len(data) + TAG_SIZE)
        cipher.encrypt_into(places.nonce(counter), data, places.associated(chunk, generation), staging)
        clear_vector_registers()
        data[:] = staging[: len(data)]
        places.keep(chunk, bytes(staging[len(data) :]), counter, generation)

    def _open_chunk(self, cipher: AESGCM, places: _Places, chunk: int) -> bool:
        data = places.data(chunk)
        tag, counter, generation = places.kept(chunk)
        staging = self._buffer(len(data) + TAG_SIZE)
        staging[: len(data)], staging[len(data) :] = data, tag
        try:
            cipher.decrypt_into(places.nonce(counter), staging, places.associated(chunk, generation), data)
        except InvalidTag:
            data[:] = bytes(len(data))
            return False
        finally:
            clear_vector_registers()
        return True

    def _next_counter(self) -> int:
        with self._counter_lock:
            if self._counter >= MAX_COUNTER:
                raise RuntimeError("the key has no unused nonce left; a nonce must not repeat")
            self._counter += 1
            return self._counter - 1

    def _buffer(self, size: int) -> memoryview:
        """Return a buffer of the calling thread, which only ever holds ciphertext."""
        kept: bytearray | None = getattr(self._staging, "buffer", None)
        if kept is None or len(kept) < size:
            kept = self._staging.buffer = bytearray(size)
        return memoryview(kept)[:size]


class _Places:
    """The chunks of a batch: their bytes, and their entries in the record's table."""

    def __init__(self, chunks: ChunkBatch) -> None:
        chunks.check()
        self._chunks = chunks
        self._record = chunks.record
        self._bytes = chunks.data.numpy().data

    @property
    def indices(self) -> range:
        """Indices of the chunks in the record."""
        return range(self._chunks.first, self._chunks.first + self._chunks.count)

    def check(self, *, opens: bool, seals: bool) -> None:
        """Raise ValueError where a chunk was never sealed, RuntimeError where one cannot be sealed again."""
        for chunk in self.indices:
            generation = self.generation(chunk)
            if opens and generation == 0:
                raise ValueError(
                    f"chunk {chunk} of record {self._record.id} was never sealed: there is nothing to open"
                )
            if seals and generation == MAX_GENERATION:
                raise RuntimeError(
                    f"chunk {chunk} of record {self._record.id} was sealed 2^32 - 1 times; a generation must "
                    "not repeat"
                )

    def run(self, first: int, stop: int) -> ChunkBatch:
        """Return the chunks [first, stop) as a batch."""
        start = (first - self._chunks.first) * self._record.chunk_bytes
        size = self._record.bytes_of(first, stop - first)
        return ChunkBatch(
            record=self._record,
            first=first,
            count=stop - first,
            data=self._chunks.data[start : start + size],
            file_offset=self._chunks.file_offset + start,
        )

    def data(self, chunk: int) -> memoryview:
        """Return the chunk's bytes; writable."""
        start = (chunk - self._chunks.first) * self._record.chunk_bytes
        return self._bytes[start : start + self._record.bytes_of(chunk, 1)]

    def nonce(self, counter: int) -> bytes:
        """Return the 12 bytes that csrc/io/sealer.hpp specifies."""
        return struct.pack("<IQ", self._record.id, counter)

    def associated(self, chunk: int, generation: int) -> bytes:
        """Return the bytes authenticated beside the chunk's, as csrc/io/sealer.hpp specifies."""
        place = (self._record.id, chunk // TILE_CHUNKS, chunk, self._record.bytes_of(chunk, 1), generation)
        return self._record.context + struct.pack("<IIIII", *place)

    def generation(self, chunk: int) -> int:
        """Return the number of times that the chunk was sealed."""
        (generation,) = struct.unpack_from("<I", self._record.table, self._generation_at(chunk))
        return int(generation)

    def kept(self, chunk: int) -> tuple[bytes, int, int]:
        """Return tag, counter and generation of what was sealed last."""
        table = self._record.table
        (counter,) = struct.unpack_from("<Q", table, self._counter_at(chunk))
        return bytes(table[chunk * TAG_SIZE : (chunk + 1) * TAG_SIZE]), counter, self.generation(chunk)

    def keep(self, chunk: int, tag: bytes, counter: int, generation: int) -> None:
        """Store tag, counter and generation of a chunk that was sealed."""
        self._record.table[chunk * TAG_SIZE : (chunk + 1) * TAG_SIZE] = tag
        struct.pack_into("<Q", self._record.table, self._counter_at(chunk), counter)
        struct.pack_into("<I", self._record.table, self._generation_at(chunk), generation)

    def _counter_at(self, chunk: int) -> int:
        return self._record.num_chunks * TAG_SIZE + chunk * COUNTER_SIZE

    def _generation_at(self, chunk: int) -> int:
        return self._record.num_chunks * (TAG_SIZE + COUNTER_SIZE) + chunk * GENERATION_SIZE
