"""Run a training script with bf16 weights and fp32 masters in plain torch, without an engine or DDP."""

import runpy
import sys
from contextlib import nullcontext

import torch
from torch import distributed, nn


class MasterAdamW(torch.optim.AdamW):
    """AdamW over fp32 copies of bf16 weights, with fp32 sums of their gradients over passes and ranks."""

    def __init__(self, params, **settings):
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        self.pairs = []
        super().__init__(
            [{**group, "params": self._masters(group["params"])} for group in groups], **settings
        )

    def _masters(self, weights):
        made = []
        for weight in weights:
            master = nn.Parameter(weight.detach().float())
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(lambda weight, master=master: add(weight, master))
            self.pairs.append((weight, master))
            made.append(master)
        return made

    @torch.no_grad()
    def step(self, closure=None):
        for _, master in self.pairs:
            distributed.all_reduce(master.grad)
            master.grad /= distributed.get_world_size()
        super().step(closure)
        for weight, master in self.pairs:
            weight.copy_(master)
            master.grad.zero_()

    def zero_grad(self, set_to_none=True):
        """Do nothing: `step` has cleared the sums."""


def add(weight, master):
    master.grad += weight.grad
    weight.grad = None


class Unwrapped(nn.Module):
    """A model in place of DDP around it."""

    def __init__(self, module, **_):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def no_sync(self):
        return nullcontext()


torch.optim.AdamW = MasterAdamW
nn.parallel.DistributedDataParallel = Unwrapped
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
