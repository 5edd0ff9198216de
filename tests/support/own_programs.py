"""Programs of a user for the real launcher: their common prelude, and gates that hold a rank.

with launched_program(tmp_path, TEXT) as launcher:
    open_gate(tmp_path, "save")
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.launcher import RunningLauncher, eventually, launched
from tests.support.ports import free_port

PRELUDE = """
import json, torch
import zerotrain.runtime as zt

FOLDER = os.path.dirname(__file__)
CHECKPOINTS = os.environ["ZEROTRAIN_CHECKPOINT_DIR"]
torch.set_num_threads(1)


def config(**changes):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **changes,
    }


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def forward(self, x):
        return self.layers(x).square().mean()


def build(**changes):
    return zt.initialize(model=Model(), config=config(**changes))[0]


def train(engine):
    loss = engine(torch.ones(2, 8))
    engine.backward(loss)
    engine.step()
    return loss


def hold(name, ranks=(1,)):
    if int(os.environ.get("RANK", 0)) in ranks:
        open(os.path.join(FOLDER, f"at-{name}-{os.environ.get('RANK', 0)}"), "w").close()
        while not os.path.exists(os.path.join(FOLDER, f"open-{name}")):
            time.sleep(0.01)
"""


@contextmanager
def launched_program(folder: Path, text: str, **changes: Any) -> Iterator[RunningLauncher]:
    """Run two ranks that execute `text` after the prelude, under a launcher."""
    program = PRELUDE + textwrap.dedent(text)
    (folder / "ds_config.json").write_text("{}")
    settings = {"checkpoint_dir": folder / "checkpoints", **changes}
    with launched(folder, program, master_port=free_port(), **settings) as launcher:
        yield launcher


def open_gate(folder: Path, name: str) -> None:
    """Release the ranks that wait at `hold(name)`."""
    (folder / f"open-{name}").touch()


def is_held(folder: Path, name: str, rank: int = 1) -> bool:
    return (folder / f"at-{name}-{rank}").exists()


def wait_for(launcher: RunningLauncher, rank: int, **values: Any) -> dict[str, Any]:
    """Wait until the rank's record has these values, and return it."""
    found: dict[str, Any] = {}

    def is_so() -> bool:
        if launcher.popen.poll() is not None:
            raise AssertionError(f"the program ended:\n{launcher.finish()[1]}")
        found.update(launcher.report()["ranks"][rank])
        return all(found[name] == value for name, value in values.items())

    eventually(is_so, what=f"rank {rank} says {json.dumps(values)}")
    return found
