"""Ranks share the cores of their worker: no rank computes with more threads than it has cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.launcher import launched
from zerotrain.runtime.launch.cores import THREADS, usable_cores, with_threads

CORES = len(os.sched_getaffinity(0))
PRINTS_THREADS = """
import torch
from zerotrain.runtime import _native
print(f"torch {torch.get_num_threads()}, kernels {_native.num_threads()}", flush=True)
"""
"""A user's program that does not know this package and sets nothing."""


def limited(folder: Path, quota: str) -> Path:
    """Make a cgroup v2 folder with this many microseconds of CPU in 100 ms."""
    folder.mkdir()
    (folder / "cpu.max").write_text(f"{quota} 100000\n")
    return folder


@pytest.mark.ranks
def test_ranks_of_a_worker_share_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (THREADS, "MKL_NUM_THREADS", "ZEROTRAIN_CPU_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    share = max(1, usable_cores()[0] // 2)
    with launched(tmp_path, PRINTS_THREADS, ranks=2) as launcher:
        code, output = launcher.finish()
    assert code == 0, output
    assert output.count(f"torch {share}, kernels {share}") == 2, output


@pytest.mark.ranks
def test_a_number_that_is_given_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number comes from podTemplate.env or from the image; here it exceeds the cores."""
    monkeypatch.setenv(THREADS, "1000")
    with launched(tmp_path, f'print("given", os.environ["{THREADS}"])', ranks=2) as launcher:
        code, output = launcher.finish()
    assert code == 0, output
    assert output.count("given 1000") == 2, output
    assert "no CPU limit" not in output


@pytest.mark.unit
@pytest.mark.parametrize(("ranks", "share"), [(1, CORES), (CORES, 1), (CORES + 1, 1)])
def test_every_rank_gets_the_same_and_one_at_least(ranks: int, share: int, tmp_path: Path) -> None:
    assert with_threads({}, ranks, tmp_path / "absent") == {THREADS: str(share)}


@pytest.mark.unit
@pytest.mark.parametrize("given", [{}, {THREADS: ""}], ids=["absent", "empty"])
def test_without_a_limit_the_log_names_whose_cores_these_are(
    given: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = with_threads({"HOME": "/tmp", **given}, 2, limited(tmp_path / "unlimited", "max"))
    assert environ == {"HOME": "/tmp", THREADS: str(max(1, CORES // 2))}
    log = capsys.readouterr().err
    assert (
        f"threads per rank: {max(1, CORES // 2)} (ranks: 2, cores: {CORES}: all, as there is no CPU limit)"
        in log
    )
    assert "spec.resources.cpu" in log


@pytest.mark.unit
def test_with_a_limit_there_is_nothing_to_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert with_threads({}, 1, limited(tmp_path / "limited", "100000")) == {THREADS: "1"}
    assert capsys.readouterr().err == ""


@pytest.mark.unit
@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max", (CORES, False)),
        ("50000", (1, True)),
        ("100000", (1, True)),
        ("100001", (min(2, CORES), True)),
        ("100000000", (CORES, True)),
    ],
)
def test_cores_follow_the_containers_limit(tmp_path: Path, quota: str, expected: tuple[int, bool]) -> None:
    v1 = tmp_path / "v1"
    (v1 / "cpu").mkdir(parents=True)
    (v1 / "cpu" / "cpu.cfs_quota_us").write_text("-1\n" if quota == "max" else f"{quota}\n")
    (v1 / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(v1) == usable_cores(limited(tmp_path / "v2", quota)) == expected


@pytest.mark.unit
def test_cores_where_nothing_sets_a_limit(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "absent") == (CORES, False)
