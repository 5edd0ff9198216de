"""Collection of the stacks of a hung attempt: from the workers' channel into a ConfigMap of the job.

It takes seconds, during which a pass must not delay other jobs: the action starts a task and returns, and the
outcome is in memory for a later pass. An operator that is killed in between collects again.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from zerotrain.contract.channel_token import derive
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions.context import ActionContext, ActionRefused
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.channel import CallKind, ChannelError, Worker, share_of
from zerotrain.operator.cluster.errors import ApiError
from zerotrain.operator.cluster.worker_poller import call_concurrently
from zerotrain.operator.reconcile import CollectStacks, StackSource, StacksView
from zerotrain.operator.resources.diagnostics import stacks_config_map

log = logging.getLogger(__name__)

MAX_JOBS = 8
"""Maximum of concurrent collections: when a file system hangs, every job hangs. The others wait for a
slot."""


async def collect(context: ActionContext, body: Json, action: CollectStacks) -> None:
    """Start the collection unless it runs or MAX_JOBS others do."""
    running = context.job_states.collections
    job = ZeroTrainingJob.parse(body)
    if job.uid in running or len(running) >= MAX_JOBS:
        return
    task = running[job.uid] = asyncio.create_task(_collect(context, job, action))
    task.add_done_callback(lambda _: running.pop(job.uid, None))


async def _collect(context: ActionContext, job: ZeroTrainingJob, action: CollectStacks) -> None:
    at = context.api.time.now()
    ask = partial(_ask, context, job, action.attempt)
    texts = await call_concurrently(ask, action.sources, most=share_of(CallKind.STACKS))
    texts_by_worker = {source.worker: text for source, text in texts.items()}
    item = stacks_config_map(job, action.attempt, texts_by_worker)
    name = ""
    try:
        await context.ensure(job, item)
        name = item["metadata"]["name"]
    except (ApiError, ActionRefused) as error:
        log.warning("cannot store the stacks of %s, attempt %d: %s", job.name, action.attempt, error)
    if context.job_states.knows(job.uid):  # a job that was deleted meanwhile must not be remembered
        context.job_states.of(job.uid).stacks = StacksView(attempt=action.attempt, at=at, config_map=name)


async def _ask(context: ActionContext, job: ZeroTrainingJob, attempt: int, source: StackSource) -> str:
    worker = Worker(namespace=job.namespace, pod=source.pod, ip=source.pod_ip)
    try:
        return await context.channel.stacks(worker, token=derive(context.operator_key, job.uid, attempt))
    except ChannelError as error:
        return f"(no stacks: {error})\n"
