"""The native threads: their number, and their use after a fork, by many callers, and if refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.support.updates import make_arrays, same_bits, update_
from zerotrain.runtime import _native

pytestmark = pytest.mark.ranks


CORES = len(os.sched_getaffinity(0))


def run_script(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


SETUP = """
import os, resource, sys, threading
from tests.support.updates import make_arrays, same_bits, update_
from zerotrain.runtime import _native
import torch
torch.set_num_threads(1)  # torch's own threads do not survive a fork
start = make_arrays("adamw", 16384 * 24 + 5, torch.float32, None)
want, got = start.copy(), start.copy()
update_(want, "adamw")
"""

WITHOUT_THREADS = """
with open("/proc/self/statm") as file:
    mapped = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (40 << 20),) * 2)
try:
    for _ in range(16):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
except RuntimeError:
    print("threads are refused", flush=True)
update_(got, "adamw", threads=24)
print(same_bits(want, got), flush=True)
"""

FORK = """
update_(got, "adamw", threads=4)  # the parent's threads exist now
for _ in range(3):
    if (child := os.fork()) == 0:
        again = start.copy()
        update_(again, "adamw", threads=4)
        os._exit(0 if same_bits(again, want) and len(os.listdir("/proc/self/task")) == 4 else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

AFFINITY = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # as OpenMP does to the thread that calls it
before = set(os.listdir("/proc/self/task"))
update_(got, "adamw", threads=3)
made = set(os.listdir("/proc/self/task")) - before
print([len(os.sched_getaffinity(int(task))) for task in made], flush=True)
"""


def test_refused_threads_leave_their_work_to_the_others() -> None:
    """The address space is nearly full, so that the system has no memory for more stacks."""
    assert run_script(SETUP + WITHOUT_THREADS) == ["threads are refused", "True"]


def test_a_forked_process_has_threads_of_its_own() -> None:
    assert run_script(SETUP + FORK) == ["0", "0", "0"]


def test_threads_may_run_where_the_process_could_when_it_began() -> None:
    assert run_script(SETUP + AFFINITY) == [str([CORES, CORES])]


def test_many_callers_at_once() -> None:
    starts = [make_arrays("adamw", 16384 * 5 + seed, torch.bfloat16, None, seed=seed) for seed in range(8)]
    wanted = [start.copy() for start in starts]
    for want in wanted:
        update_(want, "adamw")
    failures: list[int] = []

    def work(index: int) -> None:
        for threads in (0, 2, 3, 4) * 3:
            got = starts[index].copy()
            update_(got, "adamw", threads=threads)
            if not same_bits(got, wanted[index]):
                failures.append(index)

    callers = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert failures == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return tmp_path


def limited(root: Path, cores: str) -> int:
    """Return the usable threads under a cgroup v2 limit of the root group, as a container sees its own."""
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup/cpu.max").write_text(cores)
    return _native.num_usable_threads(str(root))


def test_the_least_of_cores_groups_and_variables_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ZEROTRAIN_CPU_THREADS", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    assert limited(root, "max 100000") == CORES
    assert limited(root, "50000 100000") == 1
    assert limited(root, f"{100000 * CORES - 1} 100000") == CORES  # a part of a core counts as one
    assert limited(root, "6400000 100000") == CORES
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert limited(root, "max 100000") == max(1, CORES // 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1,4")
    assert limited(root, "max 100000") == 1
    monkeypatch.setenv("ZEROTRAIN_CPU_THREADS", "1000")
    assert limited(root, "max 100000") == CORES
    monkeypatch.setenv("ZEROTRAIN_CPU_THREADS", "many")
    assert limited(root, "max 100000") == 1  # no number: as if there were no limit


def test_groups_above_count_in_both_versions(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if CORES == 1:
        pytest.skip("one core: every limit gives one thread")
    for variable in ("ZEROTRAIN_CPU_THREADS", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    groups = root / "sys/fs/cgroup"
    (groups / "pods/one").mkdir(parents=True)
    (groups / "pods/one/cpu.max").write_text("max 100000\n")
    (root / "proc/self/cgroup").write_text("0::/pods/one\n")
    assert _native.num_usable_threads(str(root)) == CORES
    (groups / "pods/cpu.max").write_text("100000 100000\n")
    assert _native.num_usable_threads(str(root)) == 1
    (root / "proc/self/cgroup").write_text("12:memory:/a\n4:cpu,cpuacct:/a/b\n0::/\n")
    folder = groups / "cpu,cpuacct/a"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert _native.num_usable_threads(str(root)) == CORES
    (folder / "cpu.cfs_quota_us").write_text("100000\n")
    assert _native.num_usable_threads(str(root)) == 1


def test_native_threads_take_no_signal(tmp_path: Path) -> None:
    """Signals belong to the program; the threads that move the spill block them, too."""
    before = set(os.listdir("/proc/self/task"))
    file = _native.SpillFile([str(tmp_path)], 4096, engine="threads")
    script = 'update_(got, "adamw", threads=2); print(sum(open(f"/proc/self/task/{t}/status").read().split('
    script += '"SigBlk:")[1].split()[0].startswith("fffffff") for t in os.listdir("/proc/self/task")))'
    started = set(os.listdir("/proc/self/task")) - before
    assert started
    for thread in started:
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        assert int(status.split("SigBlk:")[1].split()[0], 16) & 1 << 14, "SIGTERM is not blocked"
    file.close()
    assert int(run_script(SETUP + script)[0]) >= 1
