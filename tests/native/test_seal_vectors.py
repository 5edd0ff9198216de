"""Both backends compute AES-256-GCM as published, and open what the other one sealed."""

from __future__ import annotations

import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.support.chunks import BACKENDS, IDENTITY, KEY, batch_of, copy_of, sealed, sizes
from zerotrain.runtime import _native
from zerotrain.runtime.spill.seal import SealedRecord

pytestmark = pytest.mark.unit


_LONG_KEY = "feffe9928665731c6d6a8f9467308308" * 2
_LONG_PLAIN = (
    "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
    "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255"
)
_LONG_CIPHER = (
    "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
    "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad"
)
# Key, nonce, associated data, plaintext, ciphertext, tag. The first four: cases 13 to 16 of "The
# Galois/Counter Mode of Operation" (McGrew, Viega); the others: gcmEncryptExtIV256 of NIST's validation
# program.
VECTORS = [
    ("00" * 32, "00" * 12, "", "", "", "530f8afbc74536b9a963b4f1c4cb738b"),
    (
        "00" * 32,
        "00" * 12,
        "",
        "00" * 16,
        "cea7403d4d606b6e074ec5d3baf39d18",
        "d0d1c8a799996bf0265b98b5d48ab919",
    ),
    (
        _LONG_KEY,
        "cafebabefacedbaddecaf888",
        "",
        _LONG_PLAIN,
        _LONG_CIPHER,
        "b094dac5d93471bdec1a502270e3cc6c",
    ),
    (
        _LONG_KEY,
        "cafebabefacedbaddecaf888",
        "feedfacedeadbeeffeedfacedeadbeefabaddad2",
        _LONG_PLAIN[:120],
        _LONG_CIPHER[:120],
        "76fc6ece0f4e1768cddf8853bb2d551b",
    ),
    (
        "b52c505a37d78eda5dd34f20c22540ea1b58963cf8e5bf8ffa85f9f2492505b4",
        "516c33929df5a3284ff463d7",
        "",
        "",
        "",
        "bdc1ac884d332457a1d2664f168c76f0",
    ),
    (
        "31bdadd96698c204aa9ce1448ea94ae1fb4a9a0b3c9d773b51bb1822666b8f22",
        "0d18e06c7c725ac9e362e1ce",
        "",
        "2db5168e932556f8089a0622981d017d",
        "fa4362189661d163fcd6a56d8bf0405a",
        "d636ac1bbedd5cc3ee727dc2ab4a9489",
    ),
]


@pytest.mark.skipif(not _native.openssl_version(), reason="the native module was built without OpenSSL")
@pytest.mark.parametrize("vector", VECTORS)
def test_openssl_computes_the_published_vectors(vector: tuple[str, ...]) -> None:
    key, nonce, associated, plain, cipher, tag = (bytes.fromhex(part) for part in vector)
    data = bytearray(plain)
    held = _native.SpillKey(key)
    assert _native.aes_gcm_encrypt(held, nonce, associated, data) == tag
    assert data == cipher
    assert _native.aes_gcm_decrypt(held, nonce, associated, data, tag)
    assert data == plain
    assert not _native.aes_gcm_decrypt(held, nonce, associated, bytearray(cipher), bytes(16))


@pytest.mark.parametrize("vector", VECTORS)
def test_cryptography_computes_the_published_vectors(vector: tuple[str, ...]) -> None:
    key, nonce, associated, plain, cipher, tag = (bytes.fromhex(part) for part in vector)
    held = _native.SpillKey(key)
    out = bytearray(len(plain) + 16)
    AESGCM(held.view()).encrypt_into(nonce, plain, associated, out)
    assert bytes(out) == cipher + tag


@pytest.mark.parametrize("writer", sorted(BACKENDS))
@pytest.mark.parametrize("reader", sorted(BACKENDS))
def test_each_backend_opens_what_the_other_sealed(writer: str, reader: str) -> None:
    chunks, plain = sealed(BACKENDS[writer](IDENTITY, key=KEY))
    other = BACKENDS[reader](IDENTITY, key=KEY)
    record = other.add("block.0", sizes(), layout="f32,f32,f32")
    record.table[:] = chunks.record.table
    moved = batch_of(record)
    moved.data.copy_(chunks.data)
    other.open(moved)
    assert torch.equal(moved.data, plain)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_the_bytes_are_those_of_the_documented_nonce_and_context(backend: str) -> None:
    """Nonce and context are rebuilt by hand from docs/spill-encryption.md, as both backends could share an
    error."""
    sealer = BACKENDS[backend](IDENTITY, key=KEY, first_counter=1000)
    sealer.add("other", sizes())
    chunks, plain = sealed(sealer)
    again = copy_of(chunks)
    again.data.copy_(plain)
    sealer.seal(again)
    record = chunks.record
    chunk = 2
    counter = int.from_bytes(record.table[16 * 6 + 8 * chunk :][:8], "little")
    assert 1000 + 6 <= counter < 1000 + 12
    nonce = record.id.to_bytes(4, "little") + counter.to_bytes(8, "little")
    associated = _documented_context(record) + b"".join(
        field.to_bytes(4, "little") for field in (record.id, 0, chunk, record.chunk_bytes, 2)
    )
    start = chunk * record.chunk_bytes
    expected = AESGCM(KEY).encrypt(
        nonce, bytes(plain[start : start + record.chunk_bytes].tolist()), associated
    )
    assert bytes(again.data[start : start + record.chunk_bytes].tolist()) == expected[:-16]
    assert record.table[16 * chunk : 16 * chunk + 16] == expected[-16:]


def _documented_context(record: SealedRecord) -> bytes:
    names = [b"zerotrain spill store 1", IDENTITY.job.encode(), record.unit.encode(), record.layout.encode()]
    fixed = IDENTITY.rank.to_bytes(4, "little") + IDENTITY.world_size.to_bytes(4, "little")
    return fixed + b"".join(len(name).to_bytes(4, "little") + name for name in names)
