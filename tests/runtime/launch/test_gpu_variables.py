"""Variables that the launcher sets for ranks on GPUs, unless the worker's environment has its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launcher import spec_for
from zerotrain.runtime.launch.process import rank_environment

pytestmark = pytest.mark.unit

ALLOCATOR, ORDER = "PYTORCH_ALLOC_CONF", "NCCL_LAUNCH_ORDER_IMPLICIT"


def environment(**environ: str) -> dict[str, str]:
    spec = spec_for(Path(), ranks=1)
    return rank_environment(spec, 0, environ, socket_path=Path("socket"), stacks_path=Path("stacks"))


def test_segments_grow_and_communicators_keep_the_host_s_order() -> None:
    found = environment()
    assert (found[ALLOCATOR], found[ORDER]) == ("expandable_segments:True", "1")


@pytest.mark.parametrize("name", [ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_worker_s_own_allocator_stays(name: str) -> None:
    found = environment(**{name: "max_split_size_mb:128", ORDER: "0"})
    assert {ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"} & found.keys() == {name}
    assert (found[name], found[ORDER]) == ("max_split_size_mb:128", "0")
