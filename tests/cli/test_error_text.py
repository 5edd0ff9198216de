"""Errors carry texts of clusters, registries and files: none of them may control the terminal."""

from __future__ import annotations

import pytest

from zerotrain.cli.errors import CliError, show

pytestmark = pytest.mark.unit


def test_an_error_holds_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        CliError(
            "first \x1b]0;owned\x07[bold]\nsecond \x9b2J\u202e", code=64, next_step="type \x1b[2Jthis\x07"
        )
    )
    text = capsys.readouterr().err
    assert text == "error (64): first [bold]\nsecond \nnext: type this?\n"
