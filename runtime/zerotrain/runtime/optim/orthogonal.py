"""Matrices made orthogonal by Newton-Schulz iterations, as torch.optim.Muon does, and the exchange that
brings the parts of each matrix to one rank and the result back.

[Note: rounds] A rank holds parts of matrices. Every matrix gets one owner, which computes it whole, so that
the arithmetic and its order are the same for every number of ranks. The matrices are sorted by size and
processed in rounds of one matrix per rank: ranks work on matrices of about the same size at a time, and a
round's buffers are those of one matrix. The parts travel in bf16, to which the iteration rounds them first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.uneven import exchange_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class NewtonSchulz:
    """The iteration `X <- a X + (b A + c A A) X` with `A = X X^T`, which drives singular values towards 1."""

    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    steps: int = 5
    eps: float = 1e-7
    """Smallest norm by which a matrix is divided first."""

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the result for a bf16 matrix, in bf16; the operations are torch's, in torch's order."""
        a, b, c = self.coefficients
        is_tall = matrix.shape[0] > matrix.shape[1]
        value = matrix.T if is_tall else matrix
        value = value / value.norm().clamp(min=self.eps)
        for _ in range(self.steps):
            gram = value @ value.T
            step = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            value = torch.addmm(value, step, value, beta=a)
        return value.T if is_tall else value


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitMatrix:
    """A matrix whose elements lie in the ranks' memories one after another."""

    shape: tuple[int, int]
    sizes: tuple[int, ...]
    """Number of elements that each rank holds."""
    own: torch.Tensor
    """Elements of this rank in bf16, 1-D; replaced by those of the result."""


def orthogonalise(matrices: Sequence[SplitMatrix], iterate: NewtonSchulz, comm: Comm) -> None:
    """Replace every matrix by its result. Collective: the same matrices in the same order on all ranks; see
    [Note: rounds]."""
    for members in _rounds(matrices, comm.world_size):
        _run_round(members, iterate, comm)


def _rounds(matrices: Sequence[SplitMatrix], ranks: int) -> Iterator[list[SplitMatrix]]:
    order = sorted(matrices, key=lambda matrix: -sum(matrix.sizes))  # a stable sort: the same on every rank
    for first in range(0, len(order), ranks):
        yield order[first : first + ranks]


def _run_round(members: Sequence[SplitMatrix], iterate: NewtonSchulz, comm: Comm) -> None:
    """Compute matrix i on rank i."""
    idle = comm.world_size - len(members)
    sent_sizes = [*(member.sizes[comm.rank] for member in members), *[0] * idle]
    mine = members[comm.rank] if comm.rank < len(members) else None
    received_sizes = [0] * comm.world_size if mine is None else list(mine.sizes)
    sent = torch.cat([member.own for member in members])
    whole = torch.empty(sum(received_sizes), dtype=sent.dtype, device=sent.device)
    exchange_parts(comm, whole, sent, received_sizes, sent_sizes, label="matrices").wait()
    result = whole if mine is None else iterate(whole.view(mine.shape)).reshape(-1)
    exchange_parts(comm, sent, result, sent_sizes, received_sizes, label="orthogonal matrices").wait()
    for member, part in zip(members, torch.split(sent, sent_sizes[: len(members)]), strict=True):
        member.own.copy_(part)
