"""Train a tiny model with the Trainer, in a script that knows of no job."""

import argparse
import json
import os

import torch
import transformers

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--arguments", type=json.loads, default={})
parser.add_argument("--deepspeed", default=None)
parser.add_argument("--pushed", help="file for the content of each folder that would be uploaded")
given = parser.parse_args()
if {"KILL_POINT", "INSPECT"} & set(os.environ):
    from tests.support import kill_points

    kill_points.install()
JSON = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
}

torch.set_num_threads(1)
transformers.set_seed(1)
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
)
tokens = torch.randint(0, 96, (64, 12), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in tokens]
arguments = {
    "output_dir": given.output_dir,
    "deepspeed": given.deepspeed or JSON,
    "max_steps": given.steps,
    "save_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "report_to": [],
    "disable_tqdm": True,
    **given.arguments,
}


class Pushing(transformers.Trainer):
    def init_hf_repo(self):
        pass

    def _push_from_checkpoint(self, checkpoint_folder):
        if self.is_world_process_zero():
            with open(given.pushed, "a") as file:
                print(json.dumps([checkpoint_folder, os.listdir(checkpoint_folder)]), file=file)


trainer = (Pushing if given.pushed else transformers.Trainer)(
    model=model,
    args=transformers.TrainingArguments(**arguments),
    train_dataset=rows,
    eval_dataset=rows[:8],
)
trainer.train()
