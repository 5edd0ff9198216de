"""LAMB (https://arxiv.org/abs/1904.00962) as DeepSpeed's FusedLamb computes it, on sharded parameters.

Each parameter's step is scaled by the ratio of two norms over the whole parameter. A rank holds parts of
parameters, so the first pass over the shards updates the moments and sums squares. ONE exchange of a short
record then completes the norms of all parameters of the model, and a second pass applies the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zerotrain.contract.config import OptimizerConfig
from zerotrain.runtime.optim.joint import JointUnit, ParameterRun
from zerotrain.runtime.optim.update import tiles
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ


@dataclass(frozen=True, kw_only=True, slots=True)
class LambRule:
    """LAMB; the trust ratio `|weight| / |update|` of each parameter is kept in `[min_coeff, max_coeff]`."""

    max_coeff: float = 10.0
    min_coeff: float = 0.01
    bias_correction: bool = True
    eps_inside_sqrt: bool = False
    kinds: tuple[str, ...] = (EXP_AVG, EXP_AVG_SQ)

    @classmethod
    def of(cls, config: OptimizerConfig) -> LambRule:
        """Return the rule of a configuration."""
        params = config.params
        return cls(
            max_coeff=float(params.get("max_coeff", 10.0)),
            min_coeff=float(params.get("min_coeff", 0.01)),
            bias_correction=config.bias_correction,
            eps_inside_sqrt=bool(params.get("eps_inside_sqrt", False)),
        )

    def update_units(self, units: Sequence[JointUnit], step: int, *, grad_scale: float) -> None:
        """Update the units as `JointRule`."""
        squares: list[torch.Tensor] = []
        for unit in units:
            for segment in unit.segments:
                self._update_moments(unit, segment, grad_scale)
                squares.append(self._squares(unit, segment))
        mine = torch.stack(squares)
        comm = units[0].states.unit.comm
        rows = comm.gather_record(mine.flatten().tolist())
        # The sum is in rank order, so that all ranks compute the same bits.
        whole = torch.tensor(rows, dtype=torch.float64).sum(dim=0).view(-1, 2).sqrt()
        ratios = iter(whole.tolist())
        for unit in units:
            for segment in unit.segments:
                self._apply(unit, segment, step, self._trust_ratio(*next(ratios)))

    def _update_moments(self, unit: JointUnit, segment: ParameterRun, grad_scale: float) -> None:
        beta1, beta2 = segment.hyper.betas
        for tile in _tiles(unit, segment):
            grad = unit.grads[tile]
            if grad_scale != 1.0:
                grad.mul_(grad_scale)
            unit.states.by_kind[EXP_AVG][tile].mul_(beta1).add_(grad, alpha=1 - beta1)
            unit.states.by_kind[EXP_AVG_SQ][tile].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def _squares(self, unit: JointUnit, segment: ParameterRun) -> torch.Tensor:
        """Return the sums of squares (weight, update) of the part that this rank owns, in float64."""
        states = unit.states
        own_start = 0 if states.unit.placement.states_sharded else states.unit.start
        own_stop = own_start + states.unit.stop - states.unit.start
        start, stop = max(segment.start, own_start), min(segment.stop, own_stop)
        sums = torch.zeros(2, dtype=torch.float64, device=states.master.device)
        for tile in tiles(start, stop, states.master.device):
            weight = states.master[tile].double()
            update = self._direction(unit, segment, tile).double()
            sums += torch.stack((weight.dot(weight), update.dot(update)))
        return sums

    def _direction(self, unit: JointUnit, segment: ParameterRun, tile: slice) -> torch.Tensor:
        """Return the step before it is scaled."""
        states, hyper = unit.states, segment.hyper
        variance = states.by_kind[EXP_AVG_SQ][tile]
        inside = self.eps_inside_sqrt
        divisor = variance.add(hyper.eps).sqrt_() if inside else variance.sqrt().add_(hyper.eps)
        update = states.by_kind[EXP_AVG][tile] / divisor
        return update.add_(states.master[tile], alpha=hyper.weight_decay) if hyper.weight_decay else update

    def _trust_ratio(self, weight_norm: float, update_norm: float) -> float:
        if weight_norm == 0.0 or update_norm == 0.0:
            return 1.0
        return max(self.min_coeff, min(self.max_coeff, weight_norm / update_norm))

    def _apply(self, unit: JointUnit, segment: ParameterRun, step: int, ratio: float) -> None:
        rate = segment.hyper.lr
        if self.bias_correction:
            beta1, beta2 = segment.hyper.betas
            rate *= (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        for tile in _tiles(unit, segment):
            unit.states.master[tile].add_(self._direction(unit, segment, tile), alpha=-rate * ratio)


def _tiles(unit: JointUnit, segment: ParameterRun) -> Iterator[slice]:
    return tiles(segment.start, segment.stop, unit.states.master.device)
