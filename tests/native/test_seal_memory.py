"""The key is in locked pages that no core contains, and is gone in forked children and after close."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from tests.support.chunks import BACKENDS, IDENTITY, KeyedSealer, batch_of, sizes
from tests.support.process_memory import guarded_memory, guarded_ranges, read_memory
from zerotrain.runtime import _native

SECRET = bytes.fromhex("7d1c5e0b9a3f4826b7e1d2c3a4958677f0e1d2c3b4a5968778695a4b3c2d1e0f")


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest) -> KeyedSealer:
    """Return the function that makes sealers of one backend.

    Skips the test if memory cannot be guarded; the reason is then in the sealer's info.
    """
    _native.SpillKey()
    if not _native.key_memory().startswith("locked, not in cores"):
        pytest.skip(f"this system does not guard memory fully: {_native.key_memory()}")
    return BACKENDS[request.param]


@pytest.mark.unit
def test_the_key_is_only_in_guarded_memory_until_close(make: KeyedSealer) -> None:
    sealer = make(IDENTITY, key=SECRET)
    chunks = batch_of(sealer.add("block.0", sizes()))
    sealer.seal(chunks)
    assert guarded_ranges(os.getpid())
    copies = guarded_memory(os.getpid()).count(SECRET)
    assert copies >= 1
    sealer.close()
    assert guarded_memory(os.getpid()).count(SECRET) == 0


@pytest.mark.unit
@pytest.mark.skipif(
    not _native.openssl_version() or not _native.cipher_contexts_are_guarded(),
    reason="OpenSSL is not linked in statically: contexts live in ordinary memory for the time of a batch",
)
def test_what_openssl_derives_from_the_key_lies_next_to_it() -> None:
    sealer = BACKENDS["openssl"](IDENTITY, key=SECRET)
    assert guarded_memory(os.getpid()).count(SECRET) == 1
    chunks = batch_of(sealer.add("block.0", sizes()))
    sealer.seal(chunks)
    # An expanded key begins with the key; there is one per context.
    assert guarded_memory(os.getpid()).count(SECRET) >= 2
    assert "cipher contexts beside it" in sealer.info.memory
    sealer.close()
    assert guarded_memory(os.getpid()).count(SECRET) == 0


@pytest.mark.unit
def test_the_info_lists_what_is_refused_later(make: KeyedSealer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunks may need more locked memory than there is."""
    sealer = make(IDENTITY)
    monkeypatch.setattr(f"{type(sealer).__module__}.key_memory", lambda: "not locked: no more")
    assert "key: not locked: no more; " in sealer.info.memory
    sealer.close()


@pytest.mark.unit
def test_guarded_memory_lies_between_pages_that_cannot_be_touched(make: KeyedSealer) -> None:
    sealer = make(IDENTITY)
    borders: dict[tuple[str, int], str] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access = line.split()[:2]
        start, stop = (int(border, 16) for border in place.split("-"))
        borders["from", start] = borders["to", stop] = access
    for start_at, stop_at in guarded_ranges(os.getpid()):
        assert (borders["to", start_at], borders["from", stop_at]) == ("---p", "---p")
    sealer.close()


@pytest.mark.ranks
def test_a_forked_child_sees_zeros(make: KeyedSealer) -> None:
    sealer = make(IDENTITY, key=SECRET)
    sealer.seal(batch_of(sealer.add("block.0", sizes())))
    ranges = guarded_ranges(os.getpid())
    assert any(guarded_memory(os.getpid()))
    pid = os.fork()
    if pid == 0:
        wiped = all(not any(read_memory(os.getpid(), start, stop)) for start, stop in ranges)
        os._exit(0 if wiped else 1)
    assert os.waitpid(pid, 0)[1] == 0
    sealer.close()


@pytest.mark.ranks
def test_a_forked_child_guards_keys_of_its_own(make: KeyedSealer) -> None:
    sealer = make(IDENTITY, key=SECRET)
    pid = os.fork()
    if pid == 0:
        own = make(IDENTITY, key=SECRET)
        chunks = batch_of(own.add("block.0", sizes()))
        own.seal(chunks)
        own.open(chunks)
        os._exit(0 if guarded_memory(os.getpid()).count(SECRET) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    sealer.close()


@pytest.mark.unit
def test_keys_are_random_and_apart() -> None:
    keys = [_native.SpillKey() for _ in range(64)]
    assert len({bytes(key.view()) for key in keys}) == 64
    keys[0].wipe()
    with pytest.raises(RuntimeError, match="wiped"):
        keys[0].view()
    with pytest.raises(ValueError, match="32 bytes"):
        _native.SpillKey(b"short")


@pytest.mark.ranks
def test_memory_that_cannot_be_locked_is_reported_with_the_limit() -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        if os.geteuid() == 0:
            os.setuid(65534)  # root may lock memory beyond the limit
        keys = [_native.SpillKey() for _ in range(2000)]  # more keys than the memory at hand can hold
        os.write(write_end, _native.key_memory().encode())
        os._exit(len(keys) != 2000)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        report = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    assert report.startswith("not locked, the system may swap it (RLIMIT_MEMLOCK is 0 bytes): ")
