"""Fit, test and resume a LightningModule; without --strategy under DDP."""

import argparse
import json

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--deepspeed")
parser.add_argument("--strategy")
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--resume_from_checkpoint")
args = parser.parse_args()


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
        )

    def loss(self, batch):
        features, labels = batch
        return nn.functional.cross_entropy(self.layers(features), labels)

    def training_step(self, batch):
        return self.loss(batch)

    def validation_step(self, batch):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader(count, seed, **options):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 16, generator=generator)
    return DataLoader(TensorDataset(features, features[:, :4].argmax(-1)), batch_size=4, **options)


strategy = args.strategy or "ddp"
if args.deepspeed:
    with open(args.deepspeed) as file:
        read = json.load(file)
    strategy = DeepSpeedStrategy(config={"zero_optimization": read["zero_optimization"]})
lightning.seed_everything(2, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_steps=args.max_steps,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    val_check_interval=10,
    default_root_dir=args.output_dir,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[
        ModelCheckpoint(args.output_dir, filename="step-{step}", every_n_train_steps=10, save_top_k=-1)
    ],
)
net = Net()
test = loader(16, 8)
trainer.fit(net, loader(200, 7, shuffle=True), test, ckpt_path=args.resume_from_checkpoint)
print(
    "val",
    float(trainer.callback_metrics["val_loss"]),
    "lr",
    trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
)
print("test", trainer.test(net, test, verbose=False))
