"""Train with a loop of one's own over Lightning's Fabric; without a DeepSpeed JSON under DDP."""

import argparse
import json
from pathlib import Path

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path, required=True)
parser.add_argument("--deepspeed", type=Path)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
        with torch.no_grad():
            for number, weights in enumerate(self.parameters(), 1):
                weights.copy_(torch.arange(weights.numel()).mul(number).sin().view_as(weights) / 4)


strategy = args.strategy
if args.deepspeed:
    zero = json.loads(args.deepspeed.read_text())["zero_optimization"]
    strategy = DeepSpeedStrategy(config={"zero_optimization": zero})
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
seed_everything(2, verbose=False)


def loader(count, seed, **options):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 16, generator=generator)
    made = DataLoader(TensorDataset(features, features[:, :4].argmax(-1)), batch_size=4, **options)
    return fabric.setup_dataloaders(made)


with fabric.init_module():
    net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
model, optimizer = fabric.setup(net, optimizer)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
train, test = loader(160, 7, shuffle=True), loader(16, 8)
state = {"model": model, "optimizer": optimizer, "done": 0}


def run(batches):
    model.train()
    for number, (features, labels) in enumerate(batches):
        ends = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not ends):
            loss = nn.functional.cross_entropy(model(features), labels) / 2
            fabric.backward(loss)
        if ends:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state["done"] += 1


def evaluate():
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(features), labels) for features, labels in test]
    return float(fabric.all_reduce(torch.stack(losses).mean()))


run(train)
at_save, rates = evaluate(), schedule.state_dict()
fabric.save(args.output_dir / "state.ckpt", state)
batches = list(train)
run(batches)
ahead = evaluate()
fabric.load(args.output_dir / "state.ckpt", state)
schedule.load_state_dict(rates)
assert state["done"] == 10, state["done"]
assert abs(evaluate() - at_save) < 1e-6
run(batches)
assert abs(evaluate() - ahead) < 1e-6, (evaluate(), ahead)
fabric.print("RESULT", at_save, ahead, optimizer.param_groups[0]["lr"])
