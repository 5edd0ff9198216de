"""`zerotrain launch` on this machine: ranks, output, exit codes and signals of a script; options refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import commands
from tests.support.launcher import eventually
from tests.support.local_jobs import COMMAND, environment, zerotrain
from tests.support.ports import free_port

SCRIPT = Path(__file__).parents[1] / "support" / "deepspeed_script.txt"

PROGRAM = """
import os, sys
# In one piece: print writes several, and lines of other ranks may come between them.
sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n")
"""


def program(folder: Path, more: str = "") -> Path:
    path = folder / "train.py"
    path.write_text(PROGRAM + more)
    return path


@pytest.mark.ranks
def test_ranks_start_with_the_scripts_arguments(tmp_path: Path) -> None:
    done = zerotrain("launch", "--ranks", "2", program(tmp_path), "--ranks", "9", "-m")
    assert done.returncode == 0, done.stderr
    lines = set(done.stdout.splitlines())
    assert {"rank 0 of 2 ['--ranks', '9', '-m']", "[rank 1] rank 1 of 2 ['--ranks', '9', '-m']"} <= lines


@pytest.mark.ranks
def test_output_of_rank_0_is_not_changed(tmp_path: Path) -> None:
    path = program(tmp_path, "sys.stdout.write('10%\\r20%\\r')")
    popen = subprocess.run(
        [*COMMAND, "launch", str(path)],
        env=environment(CUDA_VISIBLE_DEVICES=""),  # so that there is one rank
        capture_output=True,
        check=True,
    )
    assert b"10%\r20%\r" in popen.stdout
    assert b"rank 0 of 1" in popen.stdout


@pytest.mark.ranks
def test_a_module_and_the_local_rank(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    program(tmp_path / "package")
    options = ("--ranks", "2", "--pass-local-rank", "-m", "package.train", "a")
    done = subprocess.run(
        [*COMMAND, "launch", *options],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "rank 0 of 2 ['a', '--local_rank=0']" in done.stdout, done.stderr
    assert "rank 1 of 2 ['a', '--local_rank=1']" in done.stdout


@pytest.mark.ranks
def test_the_rank_that_failed_first_decides_the_code(tmp_path: Path) -> None:
    failing = "import time\nif os.environ['RANK'] == '1': sys.exit('no such file of data')\ntime.sleep(600)"
    done = zerotrain("launch", "--ranks", "2", program(tmp_path, failing))
    assert done.returncode == 1
    assert "zerotrain launch failed" in done.stderr
    assert "rank 1 first" in done.stderr
    assert "no such file of data" in done.stderr


@pytest.mark.ranks
def test_an_interrupt_asks_the_ranks_to_stop(tmp_path: Path) -> None:
    stopping = (
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "open('ready' + os.environ['RANK'], 'w').close()\ntime.sleep(600)"
    )
    popen = subprocess.Popen(
        [*COMMAND, "launch", "--ranks", "2", str(program(tmp_path, stopping))],
        env=environment(),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    popen.send_signal(signal.SIGINT)
    _, errors = popen.communicate(timeout=300)
    assert popen.returncode == 75
    assert "zerotrain launch stopped on request" in errors


@pytest.mark.ranks
def test_several_machines_make_one_group(tmp_path: Path) -> None:
    path, master = program(tmp_path), f"127.0.0.1:{free_port()}"

    def start(node: int) -> str:
        place = ("--ranks", "2", "--nodes", "2", "--node-rank", str(node), "--master", master)
        return zerotrain("launch", *place, path).stdout

    with ThreadPoolExecutor(2) as pool:
        output = "".join(pool.map(start, range(2)))
    assert all(f"rank {rank} of 4 []" in output for rank in range(4))


@pytest.mark.ranks
def test_a_deepspeed_script_trains_unchanged(tmp_path: Path) -> None:
    script, config = tmp_path / "train.py", tmp_path / "ds_config.json"
    script.write_text(SCRIPT.read_text())
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    block = {"train_batch_size": 16, "optimizer": optimizer, "zero_optimization": zero}
    config.write_text(json.dumps(block))
    arguments = ("--steps", "4", "--output", tmp_path, "--deepspeed", "--deepspeed_config", config)
    done = zerotrain("launch", "--ranks", "2", "--pass-local-rank", script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(report["steps"], report["micro"]) for report in reports] == [(4, 8), (4, 8)]
    assert reports[0]["losses"][-1] < reports[0]["losses"][0]


@pytest.mark.ranks
def test_the_code_of_an_error_of_the_engine(tmp_path: Path) -> None:
    wrong = (
        "import deepspeed, torch\nconfig = {'train_batch_size': 1, 'zero_optimisation': {}}\n"
        "deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)"
    )
    done = zerotrain("launch", "--ranks", "1", program(tmp_path, wrong))
    assert done.returncode == 64
    assert "Did you mean zero_optimization" in done.stdout + done.stderr


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--num_gpus", "2"), 2, "--num_gpus is an option of DeepSpeed's launcher; here it is --ranks N"),
        (("--ranks", "2", "--hostfile=h"), 2, "--nodes N --node-rank I --master HOST:PORT on every host"),
        (("--nodes", "2"), 2, "--nodes needs --node-rank and --master"),
        (("--nodes", "2", "--node-rank", "2", "--master", "h:1"), 2, "--node-rank 2 is not below --nodes 2"),
        (("--nodes", "2", "--node-rank", "1", "--master", "h:x"), 2, "--master h:x is not HOST or HOST:PORT"),
        (("--master", "h:1"), 2, "--node-rank and --master are for several machines"),
        (("--ranks", "1"), 64, "absent.py is not a file"),
    ],
)
def test_wrong_options_are_refused(options: tuple[str, ...], code: int, text: str) -> None:
    done = commands.zerotrain("launch", *options, "absent.py", "--num_gpus")
    assert done.code == code
    assert text in done.err


@pytest.mark.unit
def test_a_real_deepspeed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    # What the launcher has imported matters to no rank, as each is a new process.
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    done = commands.zerotrain("launch", "--ranks", "1", program(tmp_path))
    assert done.code == 64
    assert f"DeepSpeed is installed here ({tmp_path}/deepspeed/__init__.py)" in " ".join(done.err.split())
    assert "--replace-deepspeed" in done.err
    assert sys.modules.get("deepspeed") is None
