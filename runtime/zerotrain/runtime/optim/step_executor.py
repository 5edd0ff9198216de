"""Execution of a step's update: at once, or in the background of the next forward pass (docs/adr/0016).

Called by `StepPipeline` when the ranks have agreed that the step counts and on the factor of its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zerotrain.runtime.offload.transfer import DeviceLink
from zerotrain.runtime.offload.updater import Updater
from zerotrain.runtime.optim.device_scale import GradScale, on_host
from zerotrain.runtime.optim.joint import JointRule, update_jointly
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.update import StepUpdate, UpdateRule
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.sharded_model import ShardedModel, publication_order, update_order


class StepExecutor:
    """The updates of one engine's steps."""

    def __init__(
        self,
        core: ShardedModel,
        optimizer: ZeroOptimizer,
        *,
        updater: Updater | None,
        link: DeviceLink | None,
    ) -> None:
        """Connect the engine's parts. `updater` None: updates are over when `start` returns. `link` None:
        states and weights are in the same memory."""
        self._core = core
        self._optimizer = optimizer
        self.updater = updater
        self._link = link

    @torch.no_grad()
    def start(self, grad_scale: GradScale) -> float:
        """Update every unit and start to bring its replicas up to date; return the seconds spent on the
        latter. What is not over then is waited for when it is used."""
        core, optimizer = self._core, self._optimizer
        optimizer.registry.make_deferred()  # no hook saw a backward pass if the model was not entered
        trained = [unit for unit in core.units if unit.layout.trainable]
        core.writes.take_private_pages(trained)  # counted writes were settled with the step's record
        try:
            if self.updater is not None:
                self._update_in_background(self.updater, grad_scale)
                return 0.0
            began = core.updates.replicas.seconds
            self._update(grad_scale)
            core.updates.replicas.end_step()
            return core.updates.replicas.seconds - began
        except BaseException as error:
            core.updates.fail(error)  # some units are updated, so no valid state can be saved
            raise

    def close(self) -> None:
        """End the thread of the updates and release the buffers of their copies."""
        if self.updater is not None:
            self.updater.close()
        if self._link is not None:
            self._link.close()

    def _update(self, grad_scale: GradScale) -> None:
        """Update every unit, and publish each right after its update, or all after a joint one."""
        core, optimizer = self._core, self._optimizer
        parts, replicas = core.gradients, core.updates.replicas
        if isinstance(optimizer.rule, JointRule):
            hypers, step = optimizer.begin_step(), optimizer.num_updates
            update_jointly(
                optimizer.rule,
                optimizer.registry,
                list(parts.values()),
                hypers,
                step=step,
                grad_scale=on_host(grad_scale),
            )
            for part in parts.values():
                replicas.publish(part.unit)
            return
        with self._begin(optimizer.rule, list(parts.values()), grad_scale) as update:
            for name in update.order:
                with self._copies(name):
                    update.run(name)
                if self._link is not None:
                    self._link.wait(name)
                replicas.publish(parts[name].unit)

    def _update_in_background(self, updater: Updater, grad_scale: GradScale) -> None:
        core, rule = self._core, self._optimizer.rule
        assert not isinstance(rule, JointRule)  # `make_updater` makes no thread for those
        units = update_order(core)
        parts = {unit.name: core.gradients[unit.name] for unit in units}
        update = self._begin(rule, list(parts.values()), grad_scale)

        def run(name: str) -> None:
            with self._copies(name):
                update.run(name)
            if self._link is None:
                parts[name].wipe()

        on_wait = None if self._link is None else self._link.wait
        tickets, stored = updater.submit(update.order, run, update.finish, on_wait)
        core.updates.begin(
            {unit: tickets[unit.name] for unit in units},
            stored,
            gradients=parts,
            publication=publication_order(core),
        )

    def _begin(self, rule: UpdateRule, parts: Sequence[UnitGradients], grad_scale: GradScale) -> StepUpdate:
        optimizer = self._optimizer
        hypers, step = optimizer.begin_step(), optimizer.num_updates
        if rule.prepares:
            self._core.updates.wait()  # it reads states, which the last update may still be storing
            rule = rule.prepare(
                parts, optimizer.registry, hypers, grad_scale=on_host(grad_scale), ledger=self._core.ledger
            )
        if self._link is not None:
            # From here on the link's streams wait for the main one, which computes what a rule prepares.
            states, device = optimizer.states, self._core.comm.device
            leaving = [
                part
                for part in parts
                if states[part.unit.name].device.type != device.type and part.sum.moved is None
            ]
            self._link.begin(parts, leaving=leaving)
        return StepUpdate(rule, optimizer.registry, parts, hypers, step=step, grad_scale=grad_scale)

    def _copies(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which a unit is updated, with the copies that it needs."""
        return nullcontext() if self._link is None else self._link.updating(name)
