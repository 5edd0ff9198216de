"""Train a tiny model with a loop of one's own over Accelerate, in a script that knows of no job."""

import os
import sys
import time

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed

STEPS, FOLDER = int(sys.argv[1]), "states"
JSON = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
}

torch.set_num_threads(1)
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=JSON))
set_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.utils.data.TensorDataset(torch.randn(64, 4))
model, optimizer, loader = accelerator.prepare(
    model, optimizer, torch.utils.data.DataLoader(rows, batch_size=2)
)
done = 0
if os.path.isdir(FOLDER) and (found := [int(name) for name in os.listdir(FOLDER)]):
    done = max(found)
    accelerator.load_state(f"{FOLDER}/{done}")
while done < STEPS:
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        done += 1
        time.sleep(0.01)
        if done % 5 == 0:
            accelerator.save_state(f"{FOLDER}/{done}")
        if done >= STEPS:
            break
