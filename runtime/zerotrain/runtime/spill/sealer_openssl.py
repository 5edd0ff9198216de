"""The sealer on OpenSSL: AES-256-GCM in `csrc/io`, chunk by chunk on the module's threads.

Chosen by `sealers.create_sealer` where the native module was built with OpenSSL.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerotrain.runtime._native import Sealer as NativeSealer
from zerotrain.runtime._native import (
    SpillKey,
    UpdateTask,
    cipher_contexts_are_guarded,
    key_memory,
    openssl_version,
)
from zerotrain.runtime.spill.seal import (
    ChunkBatch,
    Sealer,
    SealerInfo,
    SpillIdentity,
    SpillIntegrityError,
    chunk_cut,
    native_chunks,
)


class OpenSslSealer(Sealer):
    """A sealer that encrypts with OpenSSL, its key in guarded memory; see `Sealer`."""

    def __init__(self, identity: SpillIdentity, *, key: bytes | None = None, first_counter: int = 0) -> None:
        """Make the key. `key` and `first_counter` are for tests: the spill store never gives them, and the
        key is then random."""
        super().__init__(identity)
        self._key = SpillKey(key)
        self._native = NativeSealer(self._key, first_counter=first_counter)

    @property
    def info(self) -> SealerInfo:
        """Present state of the encryption: contexts are made with the first chunks, and guarded memory for
        them may be refused then."""
        contexts = (
            "cipher contexts beside it"
            if cipher_contexts_are_guarded()
            else "cipher contexts in ordinary memory, made for a batch and cleansed after it"
        )
        return SealerInfo(
            name="AES-256-GCM",
            backend=f"OpenSSL {openssl_version()} (EVP)",
            is_encrypted=True,
            memory=f"key: {key_memory()}; {contexts}",
        )

    def seal(self, chunks: ChunkBatch) -> None:
        """Seal chunks as `Sealer.seal`. Raises RuntimeError once closed, and in a forked child."""
        self._native.seal(native_chunks(chunks))

    def open(self, chunks: ChunkBatch) -> None:
        """Open chunks as `Sealer.open`. Raises RuntimeError once closed, and in a forked child."""
        self._refuse(chunks, self._native.open(native_chunks(chunks)))

    def update(self, chunks: ChunkBatch, task: UpdateTask, *, origin: int = 0) -> None:
        """Update chunks as `Sealer.update`. Raises RuntimeError once closed, and in a forked child."""
        self._refuse(chunks, self._native.update(native_chunks(chunks), task, **chunk_cut(chunks, origin)))

    def close(self) -> None:
        """Wipe the key and what was derived from it."""
        self._native.close()
        super().close()

    def _refuse(self, chunks: ChunkBatch, failed: Sequence[int]) -> None:
        if failed:
            places = [chunks.first + chunk for chunk in failed]
            raise SpillIntegrityError(chunks, places, rank=self.identity.rank)
