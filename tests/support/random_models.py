"""Models that are put together at random from smooth blocks, most of which use modules and tensors in unusual
ways.

A block maps a tensor of (`BATCH`, `LENGTH`, `WIDTH`) to another one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BATCH, LENGTH, WIDTH, VOCABULARY = 4, 6, 16, 11


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.down(functional.gelu(self.up(self.norm(hidden))))
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return hidden + result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.unit(hidden)[0]
        return hidden + result


class Loose(nn.Module):
    """Parameters in a list, in a dict and by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(0.1 * torch.randn(WIDTH))
        self.listed = nn.ParameterList(0.1 * torch.randn(WIDTH, WIDTH) for _ in range(2))
        self.named = nn.ParameterDict({"bias": torch.zeros(WIDTH)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = hidden @ self.listed[0] @ self.listed[1]
        result: torch.Tensor = hidden * torch.sigmoid(self.gate) + mixed + self.named["bias"]
        return result


class Experts(nn.Module):
    """Every expert runs, one of them with no rows. None is chosen by what was computed: rounding could change
    that."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Perceptron() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shares = self.router(hidden.mean(1)).softmax(-1)
        chosen, result = torch.arange(len(hidden)) % 2, hidden.clone()
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            result = result.index_put((rows,), expert(hidden[rows]) * shares[rows, index, None, None])
        return result


class Nested(nn.Module):
    """Returns a dict with a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()

    def forward(self, *, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        result = self.inner(hidden)
        return {"deep": (result if mask is None else result * mask, {"input": hidden}), "none": None}


class Unnested(nn.Module):
    """Calls a module by keywords, and takes its result out of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.nested = Nested()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.nested(hidden=hidden, mask=torch.ones_like(hidden[..., :1]))["deep"][0]
        return result


class Adapter(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.base(hidden) + self.up(self.down(hidden))
        return result


class StoresLoss(nn.Module):
    """Keeps a part of the loss in an attribute."""

    loss: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = self.linear(hidden)
        self.loss = 0.1 * result.square().mean()
        return hidden + torch.tanh(result)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen = self.inner(hidden)
        result: torch.Tensor = self.inner(0.5 * self.inner(hidden)) + 0.1 * seen
        return result


class WritesOutputs(nn.Module):
    """Writes into what modules returned, and into views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = self.first(hidden)
        result += 1
        result = self.second(result)
        result[:, 0] = 0.5
        result.view(-1).mul_(0.7)
        total: torch.Tensor = hidden + torch.sigmoid_(result) + self.layers(hidden)
        return total


class AddsToInput(nn.Module):
    """Writes into its input, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> None:
        hidden += torch.tanh(self.linear(hidden.clone()))


class WrittenInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adds = AddsToInput()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 1.0
        self.adds(hidden)
        return hidden


class Chunks(nn.Module):
    """Returns a list of views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return list(self.linear(hidden).chunk(3, -1))


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chunks = Chunks()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        value, gate, rest = self.chunks(hidden)
        result: torch.Tensor = hidden + value * torch.sigmoid(gate) + rest
        return result


class Borrows(nn.Module):
    """Uses a weight outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.other = nn.Linear(WIDTH, WIDTH), Perceptron()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        borrowed = functional.linear(hidden, 0.1 * self.owner.weight)
        result: torch.Tensor = self.other(hidden) + borrowed + self.owner(hidden)
        return result


def halve_gradient(_module: nn.Module, inputs: Any, _outputs: Any) -> Any:
    return (0.5 * inputs[0],)


class Hooked(nn.Module):
    """Hooks of the script change a module's input, output and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()
        self.inner.register_forward_pre_hook(lambda _module, args: (0.9 * args[0],))
        self.inner.register_forward_hook(lambda _module, _args, output: 1.1 * output)
        self.inner.register_full_backward_hook(halve_gradient)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(hidden)
        if result.requires_grad:
            result.register_hook(lambda gradient: 0.8 * gradient)  # type: ignore[no-untyped-call]
        return result


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            result: torch.Tensor = self.inner(hidden)
        else:
            result = checkpoint(self.inner, hidden, use_reentrant=self.reentrant)
        return result


class Sometimes(nn.Module):
    """Runs a block in some steps alone."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.inner, self.every, self.step = Perceptron(), every, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        runs = self.every and self.step % self.every == 0
        return self.inner(hidden) if runs else hidden


PLAIN: tuple[Callable[[], nn.Module], ...] = (
    *(Perceptron, Attention, Recurrent, Loose, Experts, Unnested, Adapter, Twice),
    *(WritesOutputs, WrittenInput, Chunked, Borrows, Hooked),
)


class RandomModel(nn.Module):
    """Embedding, blocks and a head, which may be tied; returns the loss of predicting the next token."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList()
        for _ in range(rng.randint(1, 5)):
            self.blocks.append(self._block(rng))
        self.order = list(range(len(self.blocks)))
        self.scale = nn.Parameter(torch.ones(WIDTH)) if rng.random() < 0.3 else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=rng.random() < 0.5)
        if rng.random() < 0.4:
            self.head.weight = self.embedding.weight
        self.masks, self.decays = rng.random() < 0.3, rng.random() < 0.15

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for index in self.order:
            hidden = self.blocks[index](hidden)
        logits = self.head(hidden if self.scale is None else hidden * self.scale)
        if self.masks:
            logits[..., 0] = -1.0
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
        if self.decays:
            loss = loss + 1e-2 * sum(value.square().sum() for value in self.parameters())
        for module in self.modules():
            if isinstance(module, StoresLoss) and module.loss is not None:
                loss, module.loss = loss + module.loss, None
        return loss

    def begin(self, step: int) -> None:
        """Tell the blocks which step it is."""
        for module in self.modules():
            if isinstance(module, Sometimes):
                module.step = step

    def _block(self, rng: random.Random) -> nn.Module:
        kind = rng.random()
        if kind < 0.2:
            return Recomputed(rng.choice(PLAIN)(), reentrant=rng.random() < 0.5)
        if kind < 0.35:
            return rng.choice((StoresLoss(), Sometimes(rng.choice((0, 2, 3)))))
        if kind < 0.45 and self.blocks:
            return rng.choice(list(self.blocks))  # a block that is used twice
        return rng.choice(PLAIN)()
