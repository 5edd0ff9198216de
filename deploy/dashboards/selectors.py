"""Placeholders of the boards' PromQL for the series that a board's variables select.

`{JOB}` selects the series of one job, and `{JOB, phase="data"}` adds a matcher. `{RANKS}` also applies the
ranks variable, `{FLEET}` the namespaces, and `{OPERATOR}` the operator's own target.
"""

from __future__ import annotations

import re

SELECTORS = {
    "JOB": 'namespace="$namespace", job_name="$job"',
    "RANKS": 'namespace="$namespace", job_name="$job", rank=~"$rank"',
    "FLEET": 'namespace=~"$namespace", job_name=~"$job"',
    "OPERATOR": 'job=~"$operator"',
}
_PLACEHOLDER = re.compile(r"\{(" + "|".join(SELECTORS) + r")\b")

WINDOW = "$__rate_interval"
"""Window of at least four scrapes at any zoom, because `rate` over fewer has gaps."""


def expand(expr: str) -> str:
    """Replace the placeholders by Grafana's variables. Line breaks and indentation are folded."""
    folded = re.sub(r"\s+", " ", expr).strip()
    folded = re.sub(r"([(\[]) | (?=[)\]])", r"\1", folded)
    return _PLACEHOLDER.sub(lambda found: "{" + SELECTORS[found[1]], folded)


def rate(metric: str, selector: str = "JOB", *, by: str = "") -> str:
    """Return the per-second rate of a counter, summed over all labels except `by` and the job."""
    return f"sum by ({_labels(by)}) (rate({metric}{{{selector}}}[{WINDOW}]))"


def mean(histogram: str, selector: str = "JOB") -> str:
    """Return the mean of a histogram's observations."""
    return f"{rate(histogram + '_sum', selector)} / {rate(histogram + '_count', selector)}"


def quantile(share: float, histogram: str, selector: str = "JOB", *, by: str = "") -> str:
    """Return a quantile over all ranks."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({share}, {rate(histogram + '_bucket', selector, by=labels)})"


def of_rank(gpu_series: str, selector: str = "RANKS") -> str:
    """Return a DCGM series of the ranks' GPUs, with the ranks' labels. The join is by the GPU's UUID."""
    # At most one rank per GPU, whatever workers export: a failing join affects all GPUs of the panel.
    info = f'max by (namespace, job_name, rank, gpu_uuid) (zerotrain_rank_info{{{selector}, gpu_uuid!=""}})'
    owner = f'label_replace(topk by (gpu_uuid) (1, {info}), "UUID", "$1", "gpu_uuid", "(.*)")'
    return f"{gpu_series} * on (UUID) group_left (namespace, job_name, rank) {owner}"


def of_pod(gpu_series: str, selector: str = "JOB") -> str:
    """Return a DCGM series of the job's pods, labelled with the job's name.

    DCGM's exporter names the pod in exported_* labels, because the plain labels are those of its own pod. A
    pod has several ranks and several GPUs, so the ranks are aggregated first; otherwise the join would be
    many-to-many. The same holds for a pod that names a second job.
    """
    owner = f"max by (namespace, pod, job_name) (zerotrain_rank_info{{{selector}}})"
    owner = f"topk by (namespace, pod) (1, {owner})"
    for label in ("namespace", "pod"):
        owner = f'label_replace({owner}, "exported_{label}", "$1", "{label}", "(.*)")'
    return f"{gpu_series} * on (exported_namespace, exported_pod) group_left (job_name) {owner}"


def _labels(by: str) -> str:
    return ", ".join(filter(None, ("namespace, job_name", by)))
