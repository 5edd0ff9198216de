"""The groups of Muon: matrices that it orthogonalises, and the rest, which AdamW updates.

A group says which with `use_muon`. A group that does not is divided: a parameter goes to Muon if its
attribute `use_muon` (DeepSpeed's) says so, and without one if it is a hidden matrix: it has two dimensions,
is not a weight of an embedding (also one that a head shares), and its name speaks of neither an embedding nor
a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerotrain.contract.config import OptimizerConfig
from zerotrain.runtime.optim.groups import PARAM_NAMES, GroupError, members, names_of
from zerotrain.runtime.zero.layout import ModelLayout

USE_MUON = "use_muon"
"""Key of a group, and attribute of a parameter: whether Muon updates it."""


class MuonGroups:
    """The rule that divides a model's parameters; `complete` applies it to groups."""

    def __init__(self, model: nn.Module, layout: ModelLayout, config: OptimizerConfig) -> None:
        """Take the model, whose parameters may be sharded already, and the layout, which has their shapes."""
        self._config = config
        self._names = names_of(model)
        self._shapes = {part.fqn: part.shape for unit in layout.units for part in unit.segments}
        self._embeddings = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            for parameter in module.parameters(recurse=False)
        }

    def divide(self, group: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
        """Return the group, or its matrices and its rest as two groups, with `use_muon` and a rate. Raises
        GroupError for `use_muon` groups with parameters that are not matrices."""
        params, labels = members(group, index)
        if USE_MUON in group:
            wrong = [p for p in params if group[USE_MUON] and len(self._shape(p)) != 2]
            if wrong:
                raise GroupError(
                    f"parameter group {index} sets use_muon and holds {self._names.get(id(wrong[0]))!r} of "
                    f"shape {tuple(self._shape(wrong[0]))}; Muon takes matrices (two dimensions) only"
                )
            return [self._completed(group, params, labels, bool(group[USE_MUON]))]
        parts = [(flag, [p for p in params if self.is_matrix(p) == flag]) for flag in (True, False)]
        names = labels.get(PARAM_NAMES)
        given = dict(zip(map(id, params), names, strict=True)) if names else {}
        return [
            self._completed(group, part, {PARAM_NAMES: [given[id(p)] for p in part]} if given else {}, flag)
            for flag, part in parts
            if part
        ] or [self._completed(group, params, labels, False)]

    def is_matrix(self, parameter: torch.Tensor) -> bool:
        """Return whether Muon updates a parameter whose group does not say."""
        if len(self._shape(parameter)) != 2:
            return False
        if (chosen := getattr(parameter, USE_MUON, None)) is not None:
            return bool(chosen)
        if id(parameter) in self._embeddings:
            return False
        parts = self._names.get(id(parameter), "").lower().split(".")
        return not any("embed" in part or part == "head" or part.endswith("_head") for part in parts)

    def _shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        name = self._names.get(id(parameter))
        return self._shapes.get(name or "", tuple(parameter.shape))

    def _completed(
        self, group: Mapping[str, Any], params: list[nn.Parameter], labels: Mapping[str, Any], flag: bool
    ) -> dict[str, Any]:
        rate = self._config.params.get("muon_lr" if flag else "adam_lr")
        rates = {} if rate is None or "lr" in group else {"lr": float(rate)}
        return {**group, **rates, **labels, "params": params, USE_MUON: flag}
