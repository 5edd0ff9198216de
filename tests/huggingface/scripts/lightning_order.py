"""Validate, fit and test one LightningModule in any order, with one Trainer or several."""

import argparse
import json

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--order", nargs="+", required=True)
parser.add_argument("--deepspeed")
parser.add_argument("--zero", default="{}", help="changes of the JSON's block")
parser.add_argument("--plateau", action="store_true")
parser.add_argument("--manual", action="store_true")
parser.add_argument("--accumulate", action="store_true", help="more micro-batches from the second epoch on")
parser.add_argument("--objects", action="store_true", help="a hyperparameter is no plain value")
args = parser.parse_args()


class Net(lightning.LightningModule):
    def __init__(self, width=64, activation=None):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not args.manual
        self.layers = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 64), nn.Linear(64, 4))

    def training_step(self, batch):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        if args.manual:
            self.manual_backward(loss)
            self.clip_gradients(self.optimizers(), gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss

    def validation_step(self, batch):
        losses.append(float(nn.functional.cross_entropy(self.layers(batch[0]), batch[1])))

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not args.plateau:
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        watched = {"scheduler": schedule, "monitor": "loss", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": watched}


def new_trainer():
    strategy = "ddp"
    if args.deepspeed:
        with open(args.deepspeed) as file:
            zero = {**json.load(file)["zero_optimization"], **json.loads(args.zero)}
        strategy = DeepSpeedStrategy(config={"zero_optimization": zero})
    options = {}
    if args.accumulate:
        schedule = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 3})
        options = {"callbacks": [schedule], "limit_train_batches": 4}
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing"), False)
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=0,
        num_sanity_val_steps=0,
        **quiet,
        **options,
    )


lightning.seed_everything(2, verbose=False)
features = torch.randn(200, 16)
data = TensorDataset(features, features[:, :4].argmax(-1))
trainer, net, losses = new_trainer(), Net(activation=nn.Tanh if args.objects else None), []
for step in args.order:
    if step == "new":
        trainer = new_trainer()
    elif step == "save":
        trainer.save_checkpoint("saved")
    elif step == "load":
        trainer.test(net, DataLoader(data, batch_size=4), ckpt_path="saved", verbose=False)
    elif step == "fresh":
        net = Net()
    elif step == "alone":
        with torch.no_grad():
            net.test_step((features, features[:, :4].argmax(-1)))
    elif step == "freeze":
        net.layers[0].requires_grad_(not net.layers[0].weight.requires_grad)
    elif step == "fit":
        trainer.fit_loop.epoch_loop.max_steps += 5
        trainer.fit(net, DataLoader(data, batch_size=4))
    else:
        getattr(trainer, step)(net, DataLoader(data, batch_size=4), verbose=False)
with open(f"evaluated{trainer.global_rank}.json", "w") as file:
    json.dump(losses, file)
