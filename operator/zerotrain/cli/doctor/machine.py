"""Checks of the processor, the memory and the kernel: what limits the ranks, and what the kernel permits."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from pathlib import Path
from typing import Any

from zerotrain.cli.doctor.finding import Finding, Group, State
from zerotrain.contract.planner import bytes_text

UNLIMITED = "no limit"
WANTED_SHM_BYTES = 256 << 20
SYS_IO_URING_SETUP = 425
SECCOMP_MODES = {"0": "off", "1": "strict", "2": "filter"}
MEMLOCK_PROBE_BYTES = 64 << 20


def processor(root: Path = Path("/")) -> list[Finding]:
    """Return findings about the cores (by affinity and limit), vector instructions and NUMA."""
    group = Group("processor")
    online, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    native = _native()
    if native is not None:
        usable = min(usable, native.num_usable_threads())
    group.add("cores", State.OK, f"{usable} usable of {online}")
    if native is None:
        group.add("vector code", State.SKIP, "", "the native module is not installed: pip install zerotrain")
    else:
        isas = native.isas()
        group.check(
            "vector code",
            isas[0],
            good=isas[0] != "baseline",
            note="neither AVX2 nor NEON: optimizer updates on the host are several times slower",
        )
        version = native.openssl_version()
        group.check(
            "encryption",
            f"OpenSSL {version}" if version else "the cryptography package",
            good=bool(version),
            note="built without OpenSSL's headers: spilled state is encrypted in a step of its own",
        )
    _numa(group, root)
    return group.findings


def _numa(group: Group, root: Path) -> None:
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    if not nodes:
        group.add("NUMA", State.SKIP, "", "the kernel does not report it")
        return
    mine = os.sched_getaffinity(0)
    used = [path.name for path in nodes if mine & _cpu_list(_text(path / "cpulist"))]
    value = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}, this process may run on {len(used)}"
    group.check(
        "NUMA",
        value,
        good=len(used) <= 1,
        note="ranks may read memory of another socket: let the kubelet align pods (Topology Manager "
        "single-numa-node, CPU Manager static)",
    )


def memory(root: Path = Path("/")) -> list[Finding]:
    """Return findings about the tightest memory limit, /dev/shm, page-locking, huge pages and swap."""
    from zerotrain.runtime.offload.free_memory import free_memory

    group = Group("memory")
    available = free_memory(root)
    group.add(
        "limit",
        State.OK,
        f"{bytes_text(available.limit)}, {bytes_text(available.free)} free",
        f"by {available.source}",
    )
    _shared_memory(group, root)
    _memlock(group)
    _huge_pages(group, root)
    swaps = _text(root / "proc/swaps").splitlines()[1:]
    group.check(
        "swap",
        f"{len(swaps)} areas" if swaps else "none",
        good=not swaps,
        note="plain weights may be written to it; Kubernetes nodes usually have none",
    )
    return group.findings


def _shared_memory(group: Group, root: Path) -> None:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError as error:
        group.add("/dev/shm", State.WARN, "none", f"ranks of one host send everything by sockets: {error}")
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    group.check(
        "/dev/shm",
        f"{bytes_text(size)}, {bytes_text(free)} free",
        good=free >= WANTED_SHM_BYTES,
        note="NCCL and data loaders want more: give resources.sharedMemory",
    )


def _memlock(group: Group) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = UNLIMITED if soft == resource.RLIM_INFINITY else bytes_text(soft)
    if hard != soft:
        value += f" (may be raised to {UNLIMITED if hard == resource.RLIM_INFINITY else bytes_text(hard)})"
    locked = _can_lock(mmap.PAGESIZE)
    if not locked:
        group.add(
            "memlock",
            State.WARN,
            value,
            "not one page can be locked: the spill's key may reach swap or cores",
        )
        return
    large = _can_lock(MEMLOCK_PROBE_BYTES)
    note = "" if large else "enough for the spill's key; RDMA and io_uring's fixed buffers need more"
    group.add("memlock", State.OK, value, note)


def _can_lock(num_bytes: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, num_bytes) as memory:
        view = (ctypes.c_char * num_bytes).from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(view))
        done = int(libc.mlock(address, ctypes.c_size_t(num_bytes))) == 0
        if done:
            libc.munlock(address, ctypes.c_size_t(num_bytes))
        del view
    return done


def _huge_pages(group: Group, root: Path) -> None:
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    reserved = re.search(r"HugePages_Total:\s+(\d+)", _text(root / "proc/meminfo"))
    value = f"transparent: {chosen[1] if chosen else 'not known'}, reserved: {reserved[1] if reserved else 0}"
    group.check(
        "huge pages",
        value,
        good=chosen is None or chosen[1] != "never",
        note="large buffers take more page faults: set transparent_hugepage to madvise on the node",
    )


def kernel(root: Path = Path("/")) -> list[Finding]:
    """Return findings about the version, seccomp, capabilities, io_uring and the core pattern."""
    group = Group("kernel")
    group.add("version", State.OK, os.uname().release)
    status = dict(
        line.split(":\t", 1) for line in _text(root / "proc/self/status").splitlines() if ":\t" in line
    )
    mode = SECCOMP_MODES.get(status.get("Seccomp", "").strip(), "not known")
    in_pod = bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
    group.check(
        "seccomp",
        mode,
        good=mode == "filter" or not in_pod,
        note="a pod of the restricted level has RuntimeDefault",
    )
    capabilities = int(status.get("CapEff", "0").strip() or "0", 16)
    group.check(
        "capabilities",
        f"{capabilities.bit_count()} in effect, user {os.geteuid()}",
        good=not in_pod or (capabilities == 0 and os.geteuid() != 0),
        note="a worker of the restricted level has none and does not run as root",
    )
    answer = io_uring_answer()
    group.check(
        "io_uring",
        answer,
        good=answer == "allowed",
        note="the spill uses libaio or threads instead; RuntimeDefault seccomp of containerd 2 forbids it",
    )
    pattern = _text(root / "proc/sys/kernel/core_pattern").strip()
    group.add(
        "core pattern", State.OK, pattern or "not known", "ranks that spill write no core, whatever it is"
    )
    return group.findings


def io_uring_answer() -> str:
    """Return "allowed" if the kernel permits io_uring_setup, else the error text.

    The call has invalid arguments, so it creates no ring. A kernel that rejects the arguments permits the
    call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(SYS_IO_URING_SETUP, 0, None)
    number = ctypes.get_errno()
    if number in (22, 14):  # EINVAL, EFAULT: it checked the arguments
        return "allowed"
    return os.strerror(number)


def _native() -> Any:
    try:
        from zerotrain.runtime import _native
    except ImportError:
        return None
    return _native


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cpu_list(text: str) -> set[int]:
    """Parse a CPU list of the kernel, such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
