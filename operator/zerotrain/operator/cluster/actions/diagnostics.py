"""Diagnostics of an attempt that failed or hangs, kept in ConfigMaps of the job: the last lines of the rank
that failed, before its pod is deleted, and the stacks of all ranks.

Lines are read through the API server, bounded in bytes and time. Stacks come from the workers' channel, which
takes seconds, during which a pass must not delay other jobs: the action starts a task and returns, and the
outcome is in memory for a later pass. An operator that is killed in between collects again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque

import aiohttp

from zerotrain.contract.channel_token import derive
from zerotrain.contract.text import one_line, printable
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions.context import ActionContext
from zerotrain.operator.cluster.actions.rejections import ActionRefused
from zerotrain.operator.cluster.api import Api, Json
from zerotrain.operator.cluster.channel import CallKind, ChannelError, WorkerAddress, share_of
from zerotrain.operator.cluster.errors import ApiError, Conflict, NotFound
from zerotrain.operator.cluster.worker_calls import call_concurrently
from zerotrain.operator.constants import CONTAINER_NAME
from zerotrain.operator.reconcile import CollectStacks, LogView, SaveLog, StackSource, StacksView
from zerotrain.operator.resources.diagnostics import (
    WorkerStacks,
    failures_config_map,
    outdated_keys,
    read_stacks,
    stacks_config_map,
)

log = logging.getLogger(__name__)

MAX_LINES = 100
"""Number of lines that are kept of the rank that failed."""

MAX_KEPT_BYTES = 40 * 1024
"""Maximum size of one failure's log in UTF-8: ten logs and their neighbours fit the 1 MiB of a ConfigMap."""

MAX_LINE_CHARS = 2000
TAIL_LINES = 2000
"""Number of lines that are requested: the lines of all ranks of the pod are mixed."""

MAX_READ_BYTES = 8 << 20
LOG_TIMEOUT_S = 5.0
"""Timeout of the kubelet's answer; the job's next attempt waits for it."""

_OTHER_RANK = re.compile(r"\[rank \d+\] ")


MAX_COLLECTIONS = 8
"""Maximum of concurrent collections: when a file system hangs, every job hangs. The others wait for a
slot."""


async def read_tail(api: Api, *, namespace: str, pod: str, container: str = CONTAINER_NAME) -> str:
    """Return the container's last lines as text. A line in brackets says why there are none, or why the last
    ones are missing."""
    text, problem = await _read_log(api, namespace, pod, container, lines=TAIL_LINES)
    if problem:  # too long or too slow: the newest lines come last, so fewer are requested
        text, problem = await _read_log(api, namespace, pod, container, lines=MAX_LINES)
    return f"{text}({problem})\n" if problem else text


async def _read_log(api: Api, namespace: str, pod: str, container: str, *, lines: int) -> tuple[str, str]:
    """Return what was read, and why it is incomplete; the latter is empty if it is complete."""
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
    params = {"container": container, "tailLines": str(lines)}
    timeout = aiohttp.ClientTimeout(total=LOG_TIMEOUT_S)
    kept, length, total = deque[bytes](), 0, 0
    problem = ""
    try:
        headers = await api.connection.headers()
        url = api.connection.server + path
        async with api.session.get(url, params=params, headers=headers, timeout=timeout) as answer:
            api.telemetry.request("GET", "pods/log", answer.status)
            # The stream ends with the newest lines, so the excess is dropped from the front.
            async for chunk in answer.content.iter_any():
                kept.append(chunk)
                length, total = length + len(chunk), total + len(chunk)
                while length - len(kept[0]) > MAX_LINES * MAX_LINE_CHARS * 4:
                    length -= len(kept.popleft())
                if total > MAX_READ_BYTES:
                    problem = "the log continues; the rest was not read"
                    break
            if answer.status >= 300:
                excerpt = one_line(b"".join(kept).decode(errors="replace"), 300)
                return f"(the log cannot be read: {answer.status} {excerpt})\n", ""
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        api.telemetry.request("GET", "pods/log", 0)
        problem = f"the log cannot be read: {error!r}"
    text = b"".join(kept).decode(errors="replace")
    return (f"{text}\n" if problem and text and not text.endswith("\n") else text), problem


def last_lines(text: str, rank: int | None) -> str:
    """Return the last lines of one rank, printable and bounded; of all ranks where the rank is not known or
    wrote none."""
    lines = text.removesuffix("\n").split("\n")
    own = lines if rank is None else [line for line in lines if _is_of(line, rank)]
    kept, remaining = list[str](), MAX_KEPT_BYTES
    for line in reversed((own or lines)[-MAX_LINES:]):
        # A terminal that shows the log must not receive the control sequences of a tenant's program.
        clean = printable(line)[:MAX_LINE_CHARS]
        remaining -= len(clean.encode(errors="replace")) + 1
        if remaining < 0:
            break
        kept.append(clean)
    return "".join(f"{line}\n" for line in reversed(kept))


def _is_of(line: str, rank: int) -> bool:
    """Return whether the rank wrote the line: the launcher marks the lines of every rank but 0."""
    if rank == 0:
        return _OTHER_RANK.match(line) is None
    return line.startswith(f"[rank {rank}] ")


async def save_log(context: ActionContext, body: Json, action: SaveLog) -> None:
    """Read and store the log. A rejection is remembered as the outcome and delays nothing, and so is an
    answer that stays an error after all retries, such as that of a webhook that is down.

    An API server that does not answer at all raises ApiError: then nothing is deleted either.
    """
    job = ZeroTrainingJob.parse(body)
    text = await read_tail(context.api, namespace=job.namespace, pod=action.pod, container=action.container)
    kept = f"{action.title}\n{last_lines(text, action.rank)}"
    error = ""
    try:
        await _store_log(context, job, action.key, kept)
    except (ActionRefused, ApiError) as refusal:
        outcome = isinstance(refusal, (ActionRefused, NotFound, Conflict)) or refusal.is_refusal
        if not outcome:
            raise
        error = f"the last lines of {action.pod} were not kept: {refusal}"
        log.warning("%s/%s: %s", job.namespace, job.name, error)
    context.job_states.of(job.uid).log = LogView(attempt=action.attempt, error=error)


async def _store_log(context: ActionContext, job: ZeroTrainingJob, key: str, text: str) -> None:
    item = failures_config_map(job, {key: text})
    found = await context.find_or_make(job, item)
    if found is not None:
        old = outdated_keys(found.get("data") or {}, key)
        data = {key: text, **dict.fromkeys(old)}
        await context.merge(item, {"metadata": {"uid": found["metadata"]["uid"]}, "data": data})


async def collect_stacks(context: ActionContext, body: Json, action: CollectStacks) -> None:
    """Start the collection unless it runs or MAX_COLLECTIONS others do."""
    running = context.job_states.collections
    job = ZeroTrainingJob.parse(body)
    if job.uid in running or len(running) >= MAX_COLLECTIONS:
        return
    task = running[job.uid] = asyncio.create_task(_collect_stacks(context, job, action))
    task.add_done_callback(lambda _: running.pop(job.uid, None))


async def _collect_stacks(context: ActionContext, job: ZeroTrainingJob, action: CollectStacks) -> None:
    at = context.api.time.now()

    async def ask(source: StackSource) -> WorkerStacks:
        text = await _ask_for_stacks(context, job, action.attempt, source)
        # Of a hostile text this takes a tenth of a second, and there may be hundreds of them.
        async with context.job_states.reading_stacks:
            return await asyncio.to_thread(read_stacks, text, workers=len(action.sources))

    found = await call_concurrently(ask, action.sources, most=share_of(CallKind.STACKS))
    by_worker = {source.worker: stacks for source, stacks in found.items()}
    item = stacks_config_map(job, action.attempt, by_worker)
    name = ""
    try:
        await context.ensure(job, item)
        name = item["metadata"]["name"]
    except (ApiError, ActionRefused) as error:
        log.warning("cannot store the stacks of %s, attempt %d: %s", job.name, action.attempt, error)
    if context.job_states.knows(job.uid):  # a job that was deleted meanwhile must not be remembered
        context.job_states.of(job.uid).stacks = StacksView(attempt=action.attempt, at=at, config_map=name)


async def _ask_for_stacks(
    context: ActionContext, job: ZeroTrainingJob, attempt: int, source: StackSource
) -> str:
    worker = WorkerAddress(namespace=job.namespace, pod=source.pod, ip=source.pod_ip)
    try:
        return await context.channel.stacks(worker, token=derive(context.operator_key, job.uid, attempt))
    except ChannelError as error:
        return f"(no stacks: {error})\n"
