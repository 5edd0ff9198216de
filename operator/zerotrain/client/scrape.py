"""Reports and metrics of the workers, requested through the API server's pod proxy, several at a time.

This needs the permission to get `pods/proxy`. A tenant's own program may serve the port: answers are bounded,
parsed with care, and a redirect is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from zerotrain.client.errors import ClientError, ForbiddenError, ServerError, WorkerError
from zerotrain.client.observed import JobProgress, MetricFamily, Pod, Sample
from zerotrain.client.transport import Transport
from zerotrain.contract.text import one_line
from zerotrain.contract.worker_environment import WORKER_HTTP_PORT
from zerotrain.contract.worker_http import METRICS_PATH, PROGRESS_PATH, WorkerReport

CALLS_AT_ONCE = 16
MAX_BYTES = 8 << 20

LET_IN = (
    "they may be starting; or their NetworkPolicy blocks the API server: add its network to the chart's "
    "value jobs.extraHttpCidrs (docs/install.md, Networks)"
)

T = TypeVar("T")


def progress(transport: Transport, pods: Iterable[Pod], job: str) -> JobProgress:
    """Return the reports of all running workers."""
    reports, silent = _ask_all(
        pods, job, lambda pod: WorkerReport.from_json(_read(transport, pod, PROGRESS_PATH))
    )
    return JobProgress(reports=reports, silent=silent)


def metrics(transport: Transport, pods: Iterable[Pod], job: str) -> list[MetricFamily]:
    """Return the metric families of all workers, each sample with the pod that it comes from."""
    answers, _ = _ask_all(
        pods, job, lambda pod: parse_families(_read(transport, pod, METRICS_PATH), {"pod": pod.name})
    )
    merged: dict[str, MetricFamily] = {}
    for family in (family for families in answers.values() for family in families):
        known = merged.get(family.name)
        merged[family.name] = replace(family, samples=known.samples + family.samples) if known else family
    return list(merged.values())


def worker_text(transport: Transport, pods: Iterable[Pod], path: str, *, worker: int) -> str | None:
    """Return one worker's answer at a path; None if it does not run. Raises ClientError."""
    pod = next((pod for pod in pods if pod.worker == worker and pod.is_running), None)
    if pod is None:
        return None
    try:
        return _read(transport, pod, path)
    except ServerError as error:
        raise WorkerError(f"pod {pod.name} does not answer: {error}", next_step=LET_IN) from error


def parse_families(text: str, labels: Mapping[str, str]) -> list[MetricFamily]:
    """Parse metrics in Prometheus' text format and add `labels`. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    return [
        MetricFamily(
            name=family.name,
            type=family.type,
            help=family.documentation,
            samples=tuple(
                Sample(name=sample.name, labels={**sample.labels, **labels}, value=float(sample.value))
                for sample in family.samples
            ),
        )
        for family in text_string_to_metric_families(text)
    ]


def _read(transport: Transport, pod: Pod, path: str) -> str:
    place = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}:{WORKER_HTTP_PORT}/proxy{path}"
    return transport.read(place, what=f"pod {pod.name}", limit=MAX_BYTES).decode(errors="replace")


def _ask_all(pods: Iterable[Pod], job: str, ask: Callable[[Pod], T]) -> tuple[dict[str, T], dict[str, str]]:
    """Return the answers by pod, and why the others gave none. Raises WorkerError if no worker answers."""
    running = [pod for pod in pods if pod.worker is not None and pod.is_running]
    if not running:
        raise WorkerError(f"no worker of {job} is running", next_step=f"zerotrain describe {job}")
    answers, silent = dict[str, T](), dict[str, str]()
    with ThreadPoolExecutor(min(CALLS_AT_ONCE, len(running))) as pool:
        for start in range(0, len(running), CALLS_AT_ONCE):
            tries = {pod.name: pool.submit(ask, pod) for pod in running[start : start + CALLS_AT_ONCE]}
            for name, attempt in tries.items():
                try:
                    answers[name] = attempt.result()
                except ForbiddenError:
                    raise
                except (ClientError, ValueError) as error:
                    silent[name] = one_line(str(error), 300)
            if not answers:
                break  # no worker can be reached, and each call may take long
    if not answers:
        name, why = next(iter(silent.items()))
        raise WorkerError(
            f"none of {len(silent)} workers of {job} answers; {name}: {why}",
            next_step=LET_IN,
        )
    return answers, silent
