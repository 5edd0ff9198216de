"""Names that DeepSpeed has and this package lacks raise with reason, nearest name and docs/deepspeed.md."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from importlib.machinery import PathFinder

import pytest
import torch

from tests.runtime.facade.test_deepspeed_names import engine_with, names_in_table, section
from zerotrain.runtime import deepspeed
from zerotrain.runtime.deepspeed import absent

pytestmark = pytest.mark.unit

PACKAGE = "zerotrain.runtime.deepspeed"


def run(statement: str) -> None:
    exec(statement, {})


def test_the_table_is_that_of_the_module() -> None:
    assert {name.removeprefix("deepspeed.") for name in names_in_table("Not here")} == set(absent.ABSENT)


@pytest.mark.parametrize("name", sorted(absent.ABSENT))
def test_the_error_for_a_name_that_is_not_here_gives_the_reason(name: str) -> None:
    above, _, last = name.rpartition(".")
    module = ".".join(filter(None, [PACKAGE, above]))
    statements = (
        (f"from {module} import {last}", ImportError),
        (f"import {PACKAGE}.{name}", ModuleNotFoundError),
        (f"import {PACKAGE}.{name}.deeper", ModuleNotFoundError),
        (f"from {PACKAGE}.{name} import Thing", ModuleNotFoundError),
        (f"from {PACKAGE}.{name}.deeper import Thing", ModuleNotFoundError),
    )
    for statement, kind in statements:
        with pytest.raises(kind) as caught:
            run(statement)
        assert absent.ABSENT[name] in str(caught.value), statement
        assert "See docs/deepspeed.md" in str(caught.value)
    with pytest.raises(AttributeError) as missing:
        getattr(importlib.import_module(module), last)
    assert absent.ABSENT[name] in str(missing.value)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (f"from {PACKAGE}.utils import safe_get_full_gradient", "the nearest is 'safe_get_full_grad'"),
        (f"from {PACKAGE} import safe_get_full_grad", "it is in deepspeed.utils"),
        (f"from {PACKAGE} import initialise", "the nearest is 'initialize'"),
        (f"from {PACKAGE}.zero import GatherParameters", "the nearest is 'GatheredParameters'"),
        (f"from {PACKAGE}.zero import TiledLinear", "deepspeed.zero.TiledLinear does not exist"),
        (f"import {PACKAGE}.runtime.zero.stage3", "deepspeed.runtime.zero.stage3 does not exist"),
        (f"from {PACKAGE}.runtime.fp16.loss_scaler import X", "deepspeed.runtime.fp16 does not exist"),
        (f"from {PACKAGE}.ops.adam import Adam", "deepspeed.ops.adam.Adam does not exist"),
        (f"import {PACKAGE}.ops.adam.multi_tensor", "deepspeed.ops.adam.multi_tensor does not exist"),
        (f"from {PACKAGE}.comm.torch import X", "deepspeed.comm.torch does not exist"),
    ],
)
def test_an_unknown_import_names_the_nearest(statement: str, words: str) -> None:
    with pytest.raises(ImportError) as caught:
        run(statement)
    assert words in str(caught.value)
    assert "docs/deepspeed.md" in str(caught.value)


def test_attributes_are_looked_up_as_ever() -> None:
    assert not hasattr(deepspeed, "init_inference")
    assert getattr(deepspeed.utils, "nothing", 7) == 7
    with pytest.raises(AttributeError, match="has no attribute '__wrapped__'"):
        deepspeed.__wrapped__  # noqa: B018
    with pytest.raises(AttributeError, match=r"docs/deepspeed\.md"):
        deepspeed.comm.nothing  # noqa: B018
    assert deepspeed.comm.all_reduce is torch.distributed.all_reduce


def test_other_packages_are_none_of_its_business() -> None:
    def places() -> list[int]:
        return [at for at, finder in enumerate(sys.meta_path) if isinstance(finder, absent.AbsentModules)]

    (place,) = places()
    assert place > sys.meta_path.index(PathFinder)
    importlib.reload(deepspeed)
    assert places() == [place]
    assert importlib.util.find_spec("surely_unknown") is None
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'zerotrain\.runtime\.surely_unknown'$"):
        run("import zerotrain.runtime.surely_unknown")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("global_step", r"the nearest of the engine's is 'global_steps'\. docs/deepspeed\.md"),
        ("get_learning_rates", r"docs/deepspeed\.md lists the engine's names"),
        ("fill_partition_cache", r"docs/deepspeed\.md"),
    ],
)
def test_an_unknown_attribute_of_the_engine(name: str, words: str) -> None:
    engine = engine_with()
    with pytest.raises(AttributeError, match=words):
        getattr(engine, name)
    assert not hasattr(engine, name)
    assert getattr(engine, "_private", None) is None
    engine.close()


def test_the_page_names_the_version() -> None:
    assert f"`{deepspeed.__version__}`" in section("Functions")
    assert re.fullmatch(r"\d+\.\d+\.\d+\+zerotrain", deepspeed.__version__)
