"""Cores: a rank that spills writes none, and a forced one holds neither spill store keys nor their round
keys."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.support.chunks import BACKENDS, IDENTITY, batch_of
from tests.support.process_memory import find_in_file, guarded_memory, possible_keys
from tests.support.secret_holder import marker_of
from zerotrain.runtime import _native
from zerotrain.runtime.comm import arena
from zerotrain.runtime.spill.secrecy import READABLE_VARIABLE, refuse_cores

pytestmark = pytest.mark.ranks


REPOSITORY = Path(__file__).parents[3]
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4


@contextmanager
def _holder(folder: Path, *steps: str) -> Iterator[tuple[subprocess.Popen[str], list[dict[str, str]]]]:
    """Provide a running `secret_holder` in `folder`, and its samples."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.secret_holder", *steps]
    with subprocess.Popen(
        command, cwd=folder, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def _force_core(process: subprocess.Popen[str], folder: Path) -> Path:
    """Force a core of a process that allows it: by SIGABRT if the kernel writes cores to folders, or gdb."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if not pattern.startswith("|") and resource.getrlimit(resource.RLIMIT_CORE)[1] != 0:
        process.send_signal(signal.SIGABRT)
        process.wait()
        where = Path(pattern).parent if pattern.startswith("/") else folder
        found = [path for path in where.glob("*core*") if path.stat().st_mtime_ns and path.stat().st_size]
        if found:
            return max(found, key=lambda path: path.stat().st_mtime_ns)
        pytest.skip(f"the kernel wrote no core (core_pattern {pattern!r})")
    if shutil.which("gdb") is None:
        pytest.skip(
            f"cores go to a collector of the host's (core_pattern {pattern!r}) and gdb is not installed"
        )
    core = folder / "core.gdb"
    attach = ["gdb", "-nx", "--batch", "-iex", "set auto-solib-add off", "-p", str(process.pid)]
    run = subprocess.run([*attach, "-ex", f"gcore {core}"], capture_output=True, text=True, check=False)
    if not core.exists():
        pytest.skip(f"gdb wrote no core: {run.stderr[-300:]}")
    return core


def _key_of(sample: dict[str, str], memory: bytes) -> bytes:
    """Return the key that opens the sample, from the guarded memory of the process that sealed it."""
    nonce, sealed, associated = (bytes.fromhex(sample[part]) for part in ("nonce", "sealed", "associated"))
    for key in possible_keys(memory):
        try:
            AESGCM(key).decrypt(nonce, sealed, associated)
        except InvalidTag:
            continue
        return key
    raise AssertionError(f"no key of {sample['backend']} in {len(memory)} guarded bytes")


def _round_keys(key: bytes) -> list[bytes]:
    """Return the round keys that a context of this process holds.

    The list is empty if contexts are not beside the key, as their place is then unknown.
    """
    if not _native.cipher_contexts_are_guarded():
        return []
    sealer = BACKENDS["openssl"](IDENTITY, key=key)
    sealer.seal(batch_of(sealer.add("block.0", [4096])))
    memory = guarded_memory(os.getpid())
    start = memory.rindex(key)
    sealer.close()
    assert memory.index(key) != start
    return [memory[start + 16 * i : start + 16 * i + 16] for i in range(15)]


@pytest.mark.skipif("openssl" not in BACKENDS, reason="the native module was built without OpenSSL")
def test_a_forced_core_holds_no_key_and_no_round_key(tmp_path: Path) -> None:
    with _holder(tmp_path, "allow") as (process, samples):
        memory, marker = guarded_memory(process.pid), marker_of(process.pid)
        core = _force_core(process, tmp_path)
    keys = {sample["backend"]: _key_of(sample, memory) for sample in samples}
    assert len(set(keys.values())) == len(BACKENDS)
    secret = [part for key in keys.values() for part in (key, *_round_keys(key))]
    # The search is for the right bytes: the context that sealed the sample is beside the key.
    assert memory.count(keys["openssl"]) == 1 + _native.cipher_contexts_are_guarded()
    found = find_in_file(core, [marker, *secret])
    core.unlink()
    assert marker in found, "the search does not find what is there"
    assert not found & set(secret)


def test_a_rank_that_spills_writes_no_core(tmp_path: Path) -> None:
    with _holder(tmp_path, "allow", "refuse") as (process, _):
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        core_limit = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
        assert core_limit.split()[4:6] == ["0", "0"]
        assert int(Path(f"/proc/{process.pid}/coredump_filter").read_text(), 16) == 0
        process.send_signal(signal.SIGABRT)
        assert process.wait() == -signal.SIGABRT
    assert not list(tmp_path.iterdir())


def test_a_core_that_a_collector_gets_all_the_same_holds_no_memory(tmp_path: Path) -> None:
    """The limit does not apply if the core goes to a program."""
    with _holder(tmp_path, "allow", "empty") as (process, samples):
        assert samples
        marker = marker_of(process.pid)
        core = _force_core(process, tmp_path)
    assert find_in_file(core, [marker]) == set()
    core.unlink()


def _in_child(check: str) -> str:
    """Return what a forked child of this process, as a user that is not root, reports after
    `refuse_cores`."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        message = "failed"
        try:
            message = CHECKS[check]()
        finally:
            os.write(write_end, message.encode())
            os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    with os.fdopen(read_end, "rb") as pipe:
        return pipe.read().decode()


def _dumpable() -> int:
    return int(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0))


def _as_user() -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _check_everything() -> str:
    _as_user()
    secrecy = refuse_cores(environ={})
    return f"{secrecy.text} {_dumpable()} {resource.getrlimit(resource.RLIMIT_CORE)}"


def _check_readable() -> str:
    _as_user()
    return f"{refuse_cores(environ={READABLE_VARIABLE: '1'}).text} {_dumpable()}"


def _check_page_map() -> str:
    """Check that the page map stays readable after an arena was made, as communication does at its start."""
    _as_user()
    arena._page_flags.cache_clear()
    shared = arena.Arena(1 << 16)
    refuse_cores(environ={})
    pages = arena.map_in_a_row([(shared.fd, 0)], 1 << 16)
    address = arena._as_bytes(pages).data_ptr()
    before = arena.has_copies(address, 1 << 16)
    pages[0] = 7
    return f"{before} {arena.has_copies(address, 1 << 16)}"


CHECKS = {"everything": _check_everything, "readable": _check_readable, "page map": _check_page_map}


def test_all_measures_are_taken_and_reported() -> None:
    message = _in_child("everything")
    assert message == "memory is in no core and not readable by the user's other processes 0 (0, 0)"


def test_debuggers_can_be_let_in_by_name() -> None:
    assert _in_child("readable") == "PR_SET_DUMPABLE not set: left alone, ZEROTRAIN_KEEP_READABLE=1 1"


def test_memory_shared_between_ranks_works_without_proc() -> None:
    assert _in_child("page map") == "False True"
