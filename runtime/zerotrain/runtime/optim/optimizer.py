"""The optimizer of one engine: its update rule, its parameter groups, and the states on shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from zerotrain.contract.config import ConfigError, OptimizerConfig
from zerotrain.runtime.offload.resident import ResidentStates
from zerotrain.runtime.optim.foreign import ForeignRule
from zerotrain.runtime.optim.fused import fused_rule
from zerotrain.runtime.optim.groups import (
    GROUP_KEYS,
    LABELS,
    PARAM_NAMES,
    GroupError,
    Hyper,
    ModelParameters,
    append_group,
    build_groups,
    check_edits,
    check_members,
    fixed_options,
    group_hyper,
    names_of,
)
from zerotrain.runtime.optim.joint import JointRule
from zerotrain.runtime.optim.lamb import LambRule
from zerotrain.runtime.optim.muon import MuonRule
from zerotrain.runtime.optim.muon_groups import USE_MUON, MuonGroups
from zerotrain.runtime.optim.onebit import OneBitAdamRule
from zerotrain.runtime.optim.rules import rule_of
from zerotrain.runtime.optim.saved_values import from_plain, match_stored, members_of, regrouped, to_plain
from zerotrain.runtime.optim.state_registry import StateRegistry
from zerotrain.runtime.optim.torch_face import ScaleNames, TorchOptimizer, refuse_step
from zerotrain.runtime.optim.update import UpdateRule
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.ledger import MemoryLedger
from zerotrain.runtime.zero.unit import Unit


def rule_for(config: OptimizerConfig) -> UpdateRule | JointRule:
    """Return the rule of a configuration. It uses a kernel where there is one (compiled in, or torch's fused
    one on a GPU), unless `torch_adam` asks for the arithmetic of torch's plain loop. Raises ConfigError where
    the native kernel was named but this installation lacks it."""
    if config.type == "OneBitAdam":
        return OneBitAdamRule(config)
    if config.type == "Lamb":
        return LambRule.of(config)
    if config.type == "Muon":
        adam = replace(config, type="AdamW", decoupled_weight_decay=True)
        return MuonRule.of(config, _elementwise_rule(adam))
    return _elementwise_rule(config)


def _elementwise_rule(config: OptimizerConfig) -> UpdateRule:
    rule = rule_of(config)
    if config.params.get("torch_adam") and not config.native:
        return rule
    rule = fused_rule(rule)
    try:
        from zerotrain.runtime.optim.native import native_rule
    except ImportError as error:
        if not config.native:
            return rule
        raise ConfigError(
            "optimizer.type",
            f"needs the native module, which this installation lacks ({error})",
            "DeepSpeedCPUAdam",
            'Install a platform wheel, or set it to "AdamW".',
        ) from error
    return native_rule(rule)


def _json_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters as they come back from JSON."""
    return {key: list(group[key]) if key == "betas" else group[key] for key in GROUP_KEYS}


def _defaults(
    config: OptimizerConfig, first: Mapping[str, Any], prototype: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Return the defaults that torch's optimizer of that kind has: schedules that cycle momentum look for
    `betas` or `momentum` in them."""
    if prototype is not None:
        return dict(prototype.defaults)
    unused = {"SGD": ("betas",), "Adagrad": ("betas", "momentum")}.get(config.type, ("momentum",))
    return {key: first[key] for key in GROUP_KEYS if key not in unused}


class ZeroOptimizer(ScaleNames, TorchOptimizer):
    """The optimizer that `initialize` returns; `engine.step()` drives it.

    `param_groups` are plain dicts as in torch: schedules and users may set `lr`, `weight_decay`, `betas`,
    `eps` and `momentum` between steps.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        config: OptimizerConfig,
        *,
        model_parameters: ModelParameters | None = None,
        prototype: torch.optim.Optimizer | None = None,
        is_torchs: bool = False,
    ) -> None:
        """Read the groups; states are made by `make_states`, unit by unit.

        `prototype` is an optimizer from outside: it does the updates, and its groups are used. `is_torchs`:
        `model_parameters` are the groups of a torch optimizer, with all its options.
        """
        given = prototype.param_groups if prototype is not None else model_parameters
        is_foreign = is_torchs or prototype is not None
        self.configured = config
        """Configuration of the optimizer that runs: the file's, or one for what the caller passed."""
        self._names = names_of(model)
        self._muon = MuonGroups(model, layout, config) if config.type == "Muon" and not is_foreign else None
        groups, group_of = build_groups(
            model,
            config,
            given,
            is_foreign=is_foreign,
            divide=None if self._muon is None else self._muon.divide,
        )
        super().__init__(groups, _defaults(config, groups[0], prototype))
        self.rule = ForeignRule(prototype, self.param_groups) if prototype is not None else rule_for(config)
        # Copied before a schedule writes `lr`: a resume must tell the user's edits from changes by a run.
        self._configured = [_json_values(group) for group in self.param_groups]
        self._fixed = [fixed_options(group) for group in self.param_groups]
        self._members = [list(group["params"]) for group in self.param_groups]
        self._num_updates = 0
        self.layout = layout
        self.registry = StateRegistry(group_of, takes_all=given is None)
        self.states = self.registry.states
        self.is_default = False
        """Whether the run names no optimizer; states are then made at the first backward pass."""

    @property
    def num_updates(self) -> int:  # type: ignore[override]  # an attribute for others
        """Number of steps that changed the weights; skipped ones do not count."""
        self.calls.settle()
        return self._num_updates

    def make_states(self, unit: Unit, ledger: MemoryLedger) -> None:
        """Make the states of a new unit, which releases its fp32 values: the values of all units never exist
        together beside the states."""
        if unit.layout.trainable:
            states = self.registry.add(unit, self.rule.kinds, ledger)
            if isinstance(self.rule, OneBitAdamRule):
                assert isinstance(states, ResidentStates)
                self.rule.attach(states, ledger)

    def take_weights(self, unit: Unit, written: torch.Tensor) -> None:
        """Follow a change of a unit's whole weights by user code."""
        if (states := self.states.get(unit.name)) is not None:
            states.take_weights(written[slice(*states.interval)])

    def append_group(self, group: Mapping[str, Any]) -> None:
        """Add a group, as `add_param_group`."""
        if isinstance(self.rule, (ForeignRule, OneBitAdamRule)):
            raise GroupError(
                f"{type(self.rule).__name__} keeps the groups that it was made with; pass all to initialize"
            )
        if self._muon is not None:
            parts = self._muon.divide(group, len(self.param_groups))
            if len(parts) > 1:
                raise GroupError(
                    "the new group holds hidden matrices and other parameters; add one group of each, or set "
                    "its use_muon to False"
                )
            group = parts[0]
        append_group(
            self.param_groups, self.registry.group_of, group, names=self._names, config=self.configured
        )
        self._configured.append(_json_values(self.param_groups[-1]))
        self._fixed.append(fixed_options(self.param_groups[-1]))
        self._members.append(list(self.param_groups[-1]["params"]))

    def check_groups(self) -> None:
        """Raise GroupError for edits of the groups that the next step could not follow."""
        self.check_param_groups()
        check_members(self.param_groups, self._members)
        for group in self.param_groups:
            group_hyper(group)  # while nothing is changed yet
        if not isinstance(self.rule, ForeignRule):  # which reads all options at every step
            check_edits(self.param_groups, self._fixed)

    def begin_step(self) -> list[Hyper]:
        """Count the next update, and return the present hyperparameters by group."""
        self._num_updates += 1
        return [group_hyper(group) for group in self.param_groups]

    def withdraw_step(self) -> None:
        """Do not count the last update: a gradient was not finite, and the device wrote nothing."""
        self._num_updates -= 1

    @property
    def is_local(self) -> bool:
        """Whether the next update takes each rank's own gradients: 1-bit Adam after its warm-up."""
        return isinstance(self.rule, OneBitAdamRule) and self.rule.is_local(self.num_updates)

    @property
    def lr(self) -> float:
        """Learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def scalars(self) -> dict[str, Any]:
        """Return the state beside the tensors, as JSON values. No update in the background reads or writes
        any of it: an update holds its own numbers by then, and rules that count are never just in time."""
        return {
            "num_updates": self.num_updates,
            "groups": [
                to_plain(
                    {key: value for key, value in group.items() if key not in ("params", PARAM_NAMES)},
                    f"param_groups[{index}]",
                )
                for index, group in enumerate(self.param_groups)
            ],
            "members": members_of(self.registry.group_of, len(self.param_groups)),
            "configured": [dict(values) for values in self._configured],
            **self.registry.scalars(),
            **({"rule": self.rule.scalars()} if isinstance(self.rule, ForeignRule) else {}),
        }

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restore the state of `scalars`, except for values that the user has configured differently since.

        Raises ValueError when the groups differ, as `match_groups` of `saved_values.py`.
        """
        order = match_stored(scalars, self.registry.group_of, len(self.param_groups))
        groups = [scalars["groups"][index] for index in order]
        self._num_updates = int(scalars["num_updates"])
        configured = scalars.get("configured")
        before = self._configured if configured is None else [configured[index] for index in order]
        if any(
            bool(mine.get(USE_MUON)) != bool(saved.get(USE_MUON))
            for mine, saved in zip(self.param_groups, groups, strict=True)
        ):
            raise ValueError(
                "a parameter group has another use_muon than in the checkpoint, where its states are of "
                "another kind; set it as it was, or load with load_optimizer_states=False"
            )
        for mine, saved, then, now in zip(self.param_groups, groups, before, self._configured, strict=True):
            edited = {key for key, value in now.items() if key in then and then[key] != value}
            restored = {key: from_plain(value, mine.get(key)) for key, value in saved.items()}
            edited |= {*LABELS} & mine.keys()  # a label belongs to the script, and moves with its members
            mine.update({key: value for key, value in restored.items() if key not in edited})
        self._fixed = [fixed_options(group) for group in self.param_groups]
        self.registry.load_scalars(scalars, [states.unit for states in self.states.values()])
        if isinstance(self.rule, ForeignRule) and "rule" in scalars:
            self.rule.load_scalars(regrouped(scalars["rule"], order))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as `engine.zero_grad()`."""
        self.calls.drop_gradients()

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:
        """Raise RuntimeError: the engine's step reduces, clips and updates together."""
        refuse_step()

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps it otherwise; the engine calls the hooks
