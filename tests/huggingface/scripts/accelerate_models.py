"""Train two models against each other with Accelerate, in a loop that steps each when it wants to."""

import argparse
from types import SimpleNamespace

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed")
args = parser.parse_args()


class Net(nn.Sequential):
    config = SimpleNamespace(hidden_size=32)  # for "auto" in the JSON

    def __init__(self, seed, outputs):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, outputs))


plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed) if args.deepspeed else None
accelerator = Accelerator(deepspeed_plugin=plugin)
maker, judge = Net(1, 8), Net(2, 1)
of_maker = torch.optim.AdamW(maker.parameters(), lr=1e-2)
of_judge = torch.optim.AdamW(judge.parameters(), lr=2e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(of_judge, lambda step: 0.9**step)
rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, rows.tanh()), batch_size=4)
maker, judge, of_maker, of_judge, schedule, loader = accelerator.prepare(
    maker, judge, of_maker, of_judge, schedule, loader
)
norms = []
for number, (noise, real) in enumerate(loader):
    judged = judge(real)
    accelerator.backward(binary_cross_entropy_with_logits(judged, torch.ones_like(judged)))
    judged = judge(maker(noise).detach())
    accelerator.backward(softplus(judged).mean())  # a second pass before the step
    norms.append(float(accelerator.clip_grad_norm_(judge.parameters(), 1.0)))
    of_judge.step()
    schedule.step()
    of_judge.zero_grad()

    accelerator.backward(softplus(-judge(maker(noise))).mean())  # through the judge, which drops its part
    if number % 3:  # else the batch is left out
        norms.append(float(accelerator.clip_grad_norm_(maker.parameters(), 1.0)))
        of_maker.step()
    of_maker.zero_grad()
    of_judge.zero_grad()
accelerator.save_state("state")
accelerator.wait_for_everyone()
accelerator.load_state("state")
accelerator.backward(softplus(-judge(maker(noise))).mean() + sum(norms))
