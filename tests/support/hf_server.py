"""Process that imports the training libraries once, and forks ranks that run scripts with them.

It reads requests from its standard input, one JSON object a line, and answers each with one line: the ranks'
wait statuses. `hf_scripts.py` starts it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.support import hf_records

LIBRARIES = (
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "datasets",
    "peft",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.grpo_trainer",
    "lightning.pytorch",
)
"""Modules whose import takes seconds; a rank imports the rest itself."""


REAL_DEEPSPEED = "REAL_DEEPSPEED"
"""Variable that is set where DeepSpeed itself trains, for a benchmark."""


def serve() -> None:
    """Import the libraries with an engine and answer requests until the input ends."""
    import_real_deepspeed() if REAL_DEEPSPEED in os.environ else import_own_engine()
    for name in LIBRARIES:
        __import__(name)
    hf_records.install()
    answers = os.fdopen(os.dup(1), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


def import_own_engine() -> None:
    """Put the engine behind the import hook."""
    import zerotrain.compat

    zerotrain.compat.deepspeed()


def import_real_deepspeed() -> None:
    """Import DeepSpeed, and let Accelerate see ranks without a GPU as one world, as for the engine."""
    import accelerate.state
    import deepspeed  # type: ignore[import-not-found, unused-ignore]  # noqa: F401

    from zerotrain.compat.libraries.mends.accelerate import join_ranks_on_processors

    join_ranks_on_processors(accelerate.state)


def run(request: dict[str, Any]) -> list[int]:
    """Fork the ranks of a request; return their wait statuses. Once one fails the others are killed."""
    pids = [fork_rank(request, rank) for rank in range(request["ranks"])]
    statuses: dict[int, int] = {}
    end = time.monotonic() + request["timeout_s"]
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses and (found := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                statuses[pid] = found[1]
        if any(statuses.values()) or time.monotonic() > end:
            time.sleep(2.0)  # the other ranks may be about to say why, too
            for pid in pids:
                if pid not in statuses:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [statuses[pid] for pid in pids]


def fork_rank(request: dict[str, Any], rank: int) -> int:
    """Fork a rank that runs the script; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        folder = Path(request["folder"])
        output = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        faulthandler.dump_traceback_later(request["timeout_s"] - 5.0, exit=True)
        rank_main(request, rank)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def rank_main(request: dict[str, Any], rank: int) -> None:
    """Run the script as a launcher starts it, and write what was recorded."""
    ranks = str(request["ranks"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["port"]), **request["environment"]}
    os.chdir(request["folder"])
    # Where DDP's own parts end after the group, a rank may wait for one that has ended.
    torch.distributed.destroy_process_group = torch.distributed.barrier
    script = Path(request["script"])
    sys.argv = [str(script), *request["arguments"]]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    hf_records.write(Path(request["folder"]) / f"rank{rank}.json")


if __name__ == "__main__":
    serve()
