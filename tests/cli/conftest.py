"""Fixtures of the command line's tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from unittest import mock

import pytest
import typer.main
import typer.testing


@pytest.fixture(scope="session", autouse=True)
def one_tree_of_commands() -> Iterator[None]:
    """Build the command tree once: typer builds it anew for each call, from the signatures of all commands,
    which takes most of the time of nearly every call here.
    """
    made = functools.cache(typer.main.get_command)
    with (
        mock.patch.object(typer.main, "get_command", made),
        mock.patch.object(typer.testing, "_get_command", made),
    ):
        yield
