"""The `zerotrain` command in this process, as an interpreter for each of a hundred calls takes minutes."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from zerotrain.cli.main import main


@dataclass(frozen=True, kw_only=True)
class Done:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def zerotrain(
    *args: str | Path, kubeconfig: Path | None = None, env: Mapping[str, str] | None = None
) -> Done:
    """Run the command as `main` does and capture its output.

    Tests that have threads must not pass `env`, as the threads read the environment variables, too.
    """
    out, err = io.StringIO(), io.StringIO()
    place = ["--kubeconfig", str(kubeconfig)] if kubeconfig is not None else []
    code = 0
    with (
        mock.patch.dict(os.environ, env) if env else contextlib.nullcontext(),
        mock.patch.object(sys, "argv", ["zerotrain", *map(str, args), *place]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return Done(code=code, out=out.getvalue(), err=err.getvalue())
