"""Runs a script or a module as `python` does, after `import deepspeed` gives the engine."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

from zerotrain.compat import CompatError, deepspeed
from zerotrain.compat.job.place import start_in_job
from zerotrain.compat.job.reporting import reported
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.launch_command import LOCAL_RANK, MODULE, OF_A_RANK, REPLACE

USAGE = f"usage: python -m zerotrain.compat [{REPLACE}] [{LOCAL_RANK}] (SCRIPT | -m MODULE) [ARG ...]"


def main(arguments: Sequence[str]) -> None:
    """Run the program that `arguments` name; exit with BAD_CONFIG if they name none or the alias is refused,
    with BAD_LAUNCH if the script cannot be read."""
    program = list(arguments)
    options = set()
    while program and program[0] in OF_A_RANK:
        options.add(program.pop(0))
    is_module = program[:1] == [MODULE]
    program = program[is_module:]
    if not program or program[0].startswith("-"):
        _refuse(USAGE)
    if LOCAL_RANK in options:
        program.append(f"--local_rank={os.environ.get('LOCAL_RANK', '0')}")
    if not is_module:
        _check_script(program[0])
        _look_beside(program[0])
    try:
        deepspeed(replace=REPLACE in options)
    except CompatError as error:
        _refuse(str(error))
    script = os.path.abspath(program[0])
    if start_in_job() and not is_module:
        program[0] = script
    sys.argv = program
    _run(program[0], is_module=is_module)


def _run(program: str, *, is_module: bool) -> None:
    try:
        with reported():
            if is_module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                _run_script(program)
    except CompatError as error:
        _refuse(str(error))
    except Exception as error:
        _exit_with_code_of(error)
        raise


def _exit_with_code_of(error: Exception) -> None:
    """Exit with the code of an error of the engine, which says whether another attempt is of use; return for
    other errors."""
    if "zerotrain.runtime.engine" not in sys.modules:
        return
    from zerotrain.runtime.train.exits import APPLICATION_FAILURE, exit_code_of

    # Whether the process had memory for a step is not known here.
    code = exit_code_of(error, has_stepped=True)
    if code != APPLICATION_FAILURE:
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(code) from None


def _refuse(text: str, code: ExitCode = ExitCode.BAD_CONFIG) -> NoReturn:
    print(f"zerotrain.compat: {text}", file=sys.stderr)
    raise SystemExit(int(code))


def _check_script(script: str) -> None:
    try:
        with open(script, "rb"):
            return
    except OSError as error:
        _refuse(f"cannot read the script {script}: {error.strerror}", ExitCode.BAD_LAUNCH)


def _look_beside(script: str) -> None:
    """Look for modules in the script's folder, as `python SCRIPT` does, and not in the current one, as
    `python -m` does."""
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))


def _run_script(script: str) -> None:
    """Run a file as the module `__main__`, which stays: threads, exit handlers and children of the script
    look for its names there."""
    loader = _ScriptLoader("__main__", os.path.abspath(script))
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=loader.path, __cached__=None, __loader__=loader, __builtins__=builtins, __annotations__={}
    )
    sys.modules["__main__"] = module
    loader.exec_module(module)


class _ScriptLoader(SourceFileLoader):
    """Loader that writes no compiled file beside the script: `python SCRIPT` writes none."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        return None
