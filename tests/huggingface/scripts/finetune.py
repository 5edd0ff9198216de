"""Fine-tune as a job does, and record what the trainer made of the rows."""

import argparse
import json
import os
from pathlib import Path

import torch

from zerotrain.compat.finetune.training import train
from zerotrain.contract.finetune_spec import FinetuneSpec

parser = argparse.ArgumentParser()
parser.add_argument("spec", type=Path)
parser.add_argument("--deepspeed", type=Path, required=True)
given = parser.parse_args()
if "KILL_POINT" in os.environ:
    from tests.support import kill_points

    kill_points.install()

torch.set_num_threads(1)
trainer = train(FinetuneSpec.from_json(given.spec.read_text()), given.deepspeed)
if os.environ["RANK"] == "0":
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset]
    Path("rows.json").write_text(json.dumps(rows))
    Path("state.json").write_text(json.dumps({"step": trainer.state.global_step}))
