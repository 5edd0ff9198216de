"""Execution of a plan's actions. Each may be repeated: objects have fixed names, and existing ones are not
made again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from zerotrain.contract.config import ConfigError
from zerotrain.operator.cluster.actions import capacity, diagnostics, prerequisites, workers
from zerotrain.operator.cluster.actions.context import ActionContext, Unfinished
from zerotrain.operator.cluster.actions.rejections import ActionRefused
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.errors import ApiError
from zerotrain.operator.cluster.jobs import JobClient
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import (
    Action,
    AskQueue,
    AskStorageClass,
    CollectStacks,
    CreateVerification,
    CreateWorkers,
    DeleteJob,
    DeletePods,
    DeleteWorkers,
    DiscoverApis,
    ForgetGroup,
    KeepShared,
    ProtectWorkers,
    ReadCapacity,
    RequestYield,
    SaveLog,
    UnprotectWorkers,
)

__all__ = ["ActionRefused", "Executor", "Unfinished"]


async def _delete_job(context: ActionContext, body: Json, action: DeleteJob) -> None:
    await JobClient(context.api).delete(body)


_PERFORM: dict[type, Callable[[ActionContext, Json, Any], Awaitable[None]]] = {
    CreateWorkers: workers.create,
    KeepShared: workers.keep_shared,
    DeleteWorkers: workers.delete_attempt,
    DeletePods: workers.delete_pods,
    SaveLog: diagnostics.save_log,
    RequestYield: workers.request_yield,
    ProtectWorkers: workers.protect,
    UnprotectWorkers: workers.unprotect,
    CollectStacks: diagnostics.collect_stacks,
    CreateVerification: workers.create_verification,
    ForgetGroup: workers.forget_group,
    DiscoverApis: prerequisites.discover,
    ReadCapacity: capacity.read,
    AskStorageClass: prerequisites.read_storage_class,
    AskQueue: prerequisites.ask_queue,
    DeleteJob: _delete_job,
}


class Executor(ActionContext):
    """Executor of all actions of the operator."""

    async def perform(self, body: Json, actions: Sequence[Action]) -> None:
        """Perform all actions in order. Raises ActionRefused, ApiError, Unfinished."""
        for action in actions:
            try:
                await _PERFORM[type(action)](self, body, action)
            except ApiError as error:
                if not error.is_refusal:
                    raise
                lasting = error.status < 500  # otherwise a webhook or the server itself is down
                raise ActionRefused(Reason.API_REFUSED, str(error), lasting=lasting) from error
            except ConfigError as error:
                # The validation of the spec judges what is rendered. If it accepted too much, the user must
                # see why.
                message = f"spec.config: {error} It can be changed while spec.suspend is true."
                raise ActionRefused(Reason.INVALID_SPEC, message, lasting=True) from error
