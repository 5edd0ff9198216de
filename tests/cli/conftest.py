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
    """Made at the first call: typer makes it anew for each, of the signatures of all commands, which takes
    most of the time of nearly every call here."""
    made = functools.cache(typer.main.get_command)
    with (
        mock.patch.object(typer.main, "get_command", made),
        mock.patch.object(typer.testing, "_get_command", made),
    ):
        yield
