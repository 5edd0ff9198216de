"""One replica of the operator: its parts, and its tasks between kopf's start-up and clean-up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from zerotrain.operator.cluster.api import Api
from zerotrain.operator.cluster.channel import (
    CONNECTIONS,
    ChannelKind,
    HttpChannel,
    SilentChannel,
    WorkerChannel,
)
from zerotrain.operator.cluster.connection import Connection
from zerotrain.operator.cluster.election import ApiLease, Leadership
from zerotrain.operator.cluster.events import EventWriter
from zerotrain.operator.cluster.executor import Executor
from zerotrain.operator.cluster.job_metrics import JobCollector
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.jobs import JobCache, JobClient
from zerotrain.operator.cluster.kueue import WorkloadWatch, workload_watches
from zerotrain.operator.cluster.limits import Creations
from zerotrain.operator.cluster.listwatch import ListWatch, ScopedWatch
from zerotrain.operator.cluster.nodes import PATH as NODES_PATH
from zerotrain.operator.cluster.progress_poller import ProgressPoller
from zerotrain.operator.cluster.reflectors import JobReflector, PodReflector
from zerotrain.operator.cluster.store import JobKey, PodStore
from zerotrain.operator.cluster.telemetry import Telemetry
from zerotrain.operator.controller.config import OperatorConfig, operator_key
from zerotrain.operator.controller.controller import Controller
from zerotrain.operator.controller.health import LoopLag, health_problems, serve, unreadable_lines
from zerotrain.operator.controller.start_slots import StartSlots
from zerotrain.operator.controller.work_queue import WorkQueue

log = logging.getLogger(__name__)

DRAIN_S = 10.0
"""Seconds for running passes to end when the replica is asked to stop; well within the Deployment's grace
period of 20 s."""
DRAIN_EVENTS_S = 3.0
"""Seconds after that for the events that these passes emitted."""


class Manager:
    """One replica of the operator, with `start()` and `stop()`."""

    def __init__(self, config: OperatorConfig, connection: Connection) -> None:
        """Prepare a replica. Raises OperatorConfigError when the channel key is missing."""
        self.config = config
        self.telemetry = Telemetry()
        self._connection = connection
        self._key = operator_key(config, in_cluster=connection.in_cluster)
        self._exits = AsyncExitStack()
        self._started = False
        self._tasks: list[asyncio.Task[None]] = []
        self._lag = LoopLag()
        self._watches: dict[str, ScopedWatch | ListWatch] = {}
        """Watches by resource, for the metrics of their age."""
        self._queues: list[WorkloadWatch] = []
        self.controller: Controller
        self._reflector: PodReflector
        self._job_reflector: JobReflector
        self._nodes: ListWatch
        self._leadership: Leadership

    async def start(self) -> None:
        api = await self._exits.enter_async_context(Api(self._connection, self.config.limits, self.telemetry))
        await JobClient(api).wait_until_served()
        channel = await self._channel(api)
        self.controller = self._make_controller(api, channel)
        controller = self.controller
        namespaces = self.config.namespaces
        self._reflector = PodReflector(
            api, controller.store, controller.pods_changed, namespaces, controller.all_changed
        )
        self._job_reflector = JobReflector(
            api, controller.jobs, controller.job_changed, controller.job_deleted, namespaces
        )
        poller = ProgressPoller(
            jobs=controller.jobs,
            store=controller.store,
            job_states=controller.job_states,
            channel=channel,
            changed=controller.queue.add,
            now=api.time.now,
        )
        self.telemetry.count_unresponsive(lambda: poller.unresponsive)
        lease = ApiLease(
            api, namespace=self.config.namespace, name=self.config.lease, identity=self.config.identity
        )
        self._leadership = Leadership(lease, gained=self._gained, lost=self._lost)
        api.may_write = lambda: self._leadership.fresh
        self._spawn("pod reflector", self._reflector.run())
        self._spawn("job reflector", self._job_reflector.run())
        self._spawn("election", self._leadership.run())
        self._spawn("first list", self._act_once_synced())
        self._spawn("resync", controller.resync(self.config.resync_s))
        self._spawn("progress", poller.run())
        self._spawn("events", controller.events.run())
        self._queues = workload_watches(api, controller.job_states, controller.queue.add, namespaces)
        for number, queues in enumerate(self._queues):
            self._spawn(f"queues {number}", queues.run())
        controller.job_states.nodes.changed = controller.node_changed
        controller.job_states.nodes.now = api.time.now
        nodes = ListWatch(api, path=NODES_PATH, kind="nodes", sink=controller.job_states.nodes)
        self._watches |= {"pods": self._reflector, "zerotrainingjobs": self._job_reflector, "nodes": nodes}
        self._nodes = nodes
        self._spawn("nodes", nodes.run())
        self._spawn("loop lag", self._lag.run())
        self._spawn("workers", controller.work(self.config.workers))
        self._started = True
        if self.config.http_address:
            await self._serve()

    async def stop(self) -> None:
        """Let running passes end, then end all tasks. The lease is kept until then and released on the way,
        so that no other replica acts beside a pass of this one."""
        if self._started:
            left = await self.controller.queue.drain(DRAIN_S)
            log.info("ending: %s", f"{left} passes are cancelled" if left else "no pass runs any more")
            if unsent := await self.controller.events.drain(DRAIN_EVENTS_S):
                log.warning("shutdown: %d events were not sent", unsent)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._exits.aclose()

    def _make_controller(self, api: Api, channel: WorkerChannel) -> Controller:
        silent = isinstance(channel, SilentChannel)
        store = PodStore()
        job_states = JobStates(
            reads_logs=not silent,
            keep_shared_s=self.config.resync_s,
            limits=self.config.starts,
            egress_bounds=self.config.resources.allowed_egress_cidrs,
        )
        queue = WorkQueue[JobKey](lambda key: key.namespace)
        executor = Executor(
            api=api,
            store=store,
            job_states=job_states,
            channel=channel,
            options=self.config.resources,
            operator_key=self._key,
            creations=Creations(),
        )
        return Controller(
            queue=queue,
            jobs=JobCache(),
            store=store,
            job_states=job_states,
            client=JobClient(api, self.config.namespaces),
            executor=executor,
            starts=StartSlots(queue.passes.are_late),
            events=EventWriter(api, instance=self.config.identity),
            telemetry=self.telemetry,
            may_act=asyncio.Event(),
            leads=lambda: self._leadership.fresh,
            clock=api.time.now,
        )

    async def _channel(self, api: Api) -> WorkerChannel:
        kind = self.config.channel
        if kind is None:
            kind = ChannelKind.DIRECT if self._connection.in_cluster else ChannelKind.PROXY
        if kind is ChannelKind.SILENT:
            return SilentChannel()
        if kind is ChannelKind.PROXY:
            session = self._connection.session(CONNECTIONS)
        else:
            connector = aiohttp.TCPConnector(limit=CONNECTIONS)
            session = aiohttp.ClientSession(connector=connector, trust_env=False)
        held = await self._exits.enter_async_context(session)
        return HttpChannel(api, held, kind, operator_key=self._key)

    def _gained(self) -> None:
        self.telemetry.leader.set(1)
        self.controller.job_states.acting_since = self.controller.clock()
        self._update_permission()

    def _lost(self) -> None:
        self.telemetry.leader.set(0)
        self._update_permission()

    async def _act_once_synced(self) -> None:
        await self._reflector.synced.wait()
        await self._job_reflector.synced.wait()
        self._update_permission()

    def _update_permission(self) -> None:
        """Allow passes only on the leader, and only with a complete view of jobs and pods."""
        if self._leadership.held.is_set() and self._is_synced():
            self.controller.may_act.set()
            self.controller.all_changed()
            for queues in self._queues:
                self._spawn("queues left behind", queues.look())
        else:
            self.controller.may_act.clear()

    def _is_synced(self) -> bool:
        return self._reflector.synced.is_set() and self._job_reflector.synced.is_set()

    def _spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(_report_end)
        self._tasks.append(task)

    async def _serve(self) -> None:
        leads = self._leadership.held.is_set
        self.telemetry.watch_jobs(JobCollector(self.controller.jobs, leads))
        stop = await serve(
            self.config.http_address,
            problems=self._problems,
            synced=self._is_synced,
            unreadable=lambda: [*unreadable_lines(self._refused()), *self.controller.statuses.lines()],
            registry=self.telemetry.registry,
            before_scrape=self._measure,
        )
        self._exits.push_async_callback(stop)

    def _problems(self) -> list[str]:
        ended = dead_tasks(self._tasks)
        age_s = max(self._reflector.age_s, self._job_reflector.age_s)
        return health_problems(lag_s=self._lag.now_s, watch_age_s=age_s) + ended

    def _refused(self) -> dict[tuple[str, str], bool]:
        """Return, by resource and namespace, whether the API server refuses to show the resource."""
        scoped = {"pods": self._reflector.refused, "zerotrainingjobs": self._job_reflector.refused}
        found = {
            (resource, namespace): is_refused
            for resource, spaces in scoped.items()
            for namespace, is_refused in spaces.items()
        }
        return found | {("nodes", ""): self._nodes.refused}

    def _measure(self) -> None:
        self.telemetry.set_unreadable(self._refused())
        self.telemetry.loop_lag_seconds.set(self._lag.seconds)
        ages = {name: watch.age_s for name, watch in self._watches.items()}
        queues = [age for watch in self._queues if (age := watch.age_s) is not None]
        self.telemetry.set_watch_ages(ages | {"workloads": max(queues, default=0.0)})
        self.telemetry.unwritten_jobs.set(len(self.controller.statuses))
        self.telemetry.queue_depth.set(len(self.controller.queue))
        self.telemetry.queue_oldest_age_seconds.set(self.controller.queue.oldest_age_s)
        self.telemetry.count_jobs(self.controller.phases())


def dead_tasks(tasks: Iterable[asyncio.Task[None]]) -> list[str]:
    """Return one line per task that ended with an error: only a restart brings that part of the operator
    back."""
    failed = [task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None]
    return [f"task {task.get_name()!r} ended: {task.exception()!r}" for task in failed]


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("task %r ended", task.get_name(), exc_info=task.exception())
