"""Imports of commands: help and reads of a cluster start quickly, and work without the runtime installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zerotrain.client.command_exits import CommandExit

pytestmark = pytest.mark.ranks


HEAVY = (
    "torch",
    "numpy",
    "textual",
    "zerotrain.runtime",
    "zerotrain.contract.config",
    "zerotrain.operator.api",
)
STATUS = (
    "base",
    "core",
    "core.meta",
    "elastic",
    "hangs",
    "lenient",
    "lifecycle",
    "memory_plan",
    "scheduling",
    "status",
)
"""Modules of the API with which a status is read; those of the spec take several times as long."""
PROGRAM = """
import json, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None
from zerotrain.cli.main import main
sys.argv = ["zerotrain", *sys.argv[2:]]
try:
    main()
except SystemExit as end:
    code = end.code
else:
    code = 0
found = [name for name, module in sys.modules.items() if module is not None]
print("@@" + json.dumps([code or 0, found]))
"""


def run(*args: str, without: tuple[str, ...] = ()) -> tuple[int, list[str], str]:
    """Return exit code, modules and standard error of a command in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(without), *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    code, modules = json.loads(done.stdout.rpartition("@@")[2])
    return code, modules, done.stderr


def heavy(modules: list[str]) -> list[str]:
    return [name for name in modules if any(f"{name}.".startswith(f"{item}.") for item in HEAVY)]


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["checkpoint", "ls", "--help"],
        ["config", "check", "--help"],
        ["explain", "exit-code", "84"],
        ["explain", "condition", "Stalled"],
        ["version"],
    ],
)
def test_what_only_prints_text_imports_nothing_heavy(args: list[str]) -> None:
    code, modules, output = run(*args)
    assert code == 0, output
    assert heavy(modules) == []


def test_a_look_at_a_cluster_needs_no_runtime(tmp_path: Path) -> None:
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    code, modules, _ = run("get", "--kubeconfig", str(path))
    assert code == CommandExit.UNREACHABLE
    api = "zerotrain.operator.api"
    assert set(heavy(modules)) == {api, *(f"{api}.{name}" for name in STATUS)}
    assert "kubernetes.client" in modules


def test_the_check_sees_a_heavy_import() -> None:
    assert heavy(["zerotrain.runtime", "zerotrain.runtime.launch", "torch", "zerotrain.runtimes"]) == [
        "zerotrain.runtime",
        "zerotrain.runtime.launch",
        "torch",
    ]


@pytest.mark.parametrize(
    ("missing", "args"),
    [
        ("zerotrain.runtime", ["ls", "."]),
        ("zerotrain.runtime", ["verify", "."]),
        ("zerotrain.runtime", ["diff", ".", "."]),
        ("torch", ["diff", ".", "."]),
        ("torch", ["import", ".", "."]),
    ],
)
def test_without_the_runtime_a_command_names_what_to_install(missing: str, args: list[str]) -> None:
    code, _, output = run("checkpoint", *args, without=(missing,))
    assert code == CommandExit.INVALID
    needed = "the runtime" if missing == "zerotrain.runtime" else missing
    assert f"this command needs {needed}, which is not installed" in output
    assert "pip install 'zerotrain[runtime]'" in output
    assert "Traceback" not in output
