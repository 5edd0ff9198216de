"""All that a job consists of, posted without an operator: what is left of a time when that costs nothing.

The objects are the operator's own, made by the functions that it calls; status and event are those of a job
that it started itself. The jobs are managed by somebody else, so that it looks away, and the pods bear labels
that it does not know. Nobody watches them, decides about them or is ready for anything to go wrong.
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
"""So long after its pods the operator writes a job's status when many start: most of them run by then."""
_LABEL = re.compile(r'"zerotrain\.dev/(job|job-uid|attempt|rank)"')


@dataclass(frozen=True, kw_only=True)
class Belongings:
    """What of a job only an operator can tell."""

    status: Json
    event: Json

    @classmethod
    async def learned(cls, bench: Bench) -> Belongings:
        """From a job that the operator, which must be running, brings up."""
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
        """As many creations at once as of any other contender."""
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
    """With labels that are as long as the operator's."""
    return dict(json.loads(_LABEL.sub(r'"zerotrain.dev-\1"', json.dumps(item))))
