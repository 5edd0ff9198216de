"""All objects of a job, posted without an operator: the time that remains if the operator costs nothing.

The objects are the operator's own, made by the functions that it calls; status and event are those of a job
that the operator started. The jobs have another manager, so that the operator ignores them, and the pods have
labels that it does not know. No component watches them, decides about them or handles failures.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.benchmarks.bench_operator_loads import IN_FLIGHT, Size, collection, zerotrain_job
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.resources import ResourceOptions, shared_objects, worker_pods

if TYPE_CHECKING:
    from tests.benchmarks.bench_operator_loads import Bench

Json = dict[str, Any]

KEY = b"k" * 32
MANAGER = "example.com/benchmark"
START_S = 3.0
"""Seconds after the pods' creation at which the operator writes a job's status when many start.

Most pods run by then.
"""
_LABEL = re.compile(r'"zerotrain\.dev/(job|job-uid|attempt|rank)"')


@dataclass(frozen=True, kw_only=True)
class Belongings:
    """Parts of a job that only an operator can make."""

    status: Json
    event: Json

    @classmethod
    async def learned(cls, bench: Bench) -> Belongings:
        """Return the parts of a job that the operator, which must be running, starts."""
        namespace = await bench.namespace()
        path = f"{collection('ZeroTrainingJob', namespace)}/model"
        await bench.create([zerotrain_job(namespace, "model", 4)])
        while True:
            job = await bench.get(path)
            events = (await bench.get(collection("Event", namespace)))["items"]
            mine = [item for item in events if item["regarding"].get("uid") == job["metadata"]["uid"]]
            if job.get("status", {}).get("phase") == "Running" and mine:
                break
            await asyncio.sleep(0.2)
        await bench.clean(namespace)
        return cls(status=job["status"], event=mine[0])

    async def create(self, bench: Bench, namespace: str, size: Size) -> None:
        """Create the objects, with as many requests in flight as any other contender."""
        places = asyncio.Semaphore(IN_FLIGHT)

        async def one(request: Awaitable[Json]) -> Json:
            async with places:
                return await request

        async def belonging(number: int) -> None:
            body = zerotrain_job(namespace, f"job-{number}", size.workers, managedBy=MANAGER)
            made = await one(bench.post(body))
            job = ZeroTrainingJob.parse(made)
            shared = shared_objects(job, 1, KEY, ResourceOptions())
            await asyncio.gather(*(one(bench.post(_foreign(item))) for item in shared))
            pods = worker_pods(job, 1, range(size.workers), ResourceOptions())
            await asyncio.gather(*(one(bench.post(_foreign(pod))) for pod in pods))
            await asyncio.sleep(START_S)
            await one(bench.put_status({**made, "status": self.status}))
            await one(bench.post(self._event(job)))

        await asyncio.gather(*(belonging(number) for number in range(size.jobs)))

    def _event(self, job: ZeroTrainingJob) -> Json:
        meta = {"name": f"{job.name}.{job.uid}", "namespace": job.namespace}
        regarding = {**self.event["regarding"], "name": job.name, "namespace": job.namespace, "uid": job.uid}
        return {
            **self.event,
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": meta,
            "regarding": regarding,
        }


def _foreign(item: Json) -> Json:
    """Return the object with other labels of the same length as the operator's."""
    return dict(json.loads(_LABEL.sub(r'"zerotrain.dev-\1"', json.dumps(item))))
