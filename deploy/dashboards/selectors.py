"""Placeholders of the boards' PromQL: which series a board's variables select, written once.

`{JOB}` selects the series of one job, `{JOB, phase="data"}` adds a matcher; `{RANKS}` also obeys the ranks
variable, `{FLEET}` the namespaces, `{OPERATOR}` the operator's own target.
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
"""At least four scrapes, whatever the zoom: `rate` over less shows gaps."""


def expand(expr: str) -> str:
    """PromQL with Grafana's variables. Line breaks and indentation of the source are folded."""
    folded = re.sub(r"\s+", " ", expr).strip()
    folded = re.sub(r"([(\[]) | (?=[)\]])", r"\1", folded)
    return _PLACEHOLDER.sub(lambda found: "{" + SELECTORS[found[1]], folded)


def rate(metric: str, selector: str = "JOB", *, by: str = "") -> str:
    """Per-second rate of a counter, summed over everything but `by` and the job."""
    return f"sum by ({_labels(by)}) (rate({metric}{{{selector}}}[{WINDOW}]))"


def mean(histogram: str, selector: str = "JOB", *, by: str = "") -> str:
    """Mean of a histogram's observations."""
    return f"{rate(histogram + '_sum', selector, by=by)} / {rate(histogram + '_count', selector, by=by)}"


def quantile(share: float, histogram: str, selector: str = "JOB", *, by: str = "") -> str:
    """Quantile over all ranks."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({share}, {rate(histogram + '_bucket', selector, by=labels)})"


def of_rank(gpu_series: str, selector: str = "RANKS") -> str:
    """A DCGM series, narrowed to the GPUs of the ranks and labelled with them: joined by the GPU's UUID."""
    # One rank for each GPU, whatever the workers serve: a join fails as a whole, for all GPUs of the panel.
    info = f'max by (namespace, job_name, rank, gpu_uuid) (zerotrain_rank_info{{{selector}, gpu_uuid!=""}})'
    owner = f'label_replace(topk by (gpu_uuid) (1, {info}), "UUID", "$1", "gpu_uuid", "(.*)")'
    return f"{gpu_series} * on (UUID) group_left (namespace, job_name, rank) {owner}"


def of_pod(gpu_series: str, selector: str = "JOB") -> str:
    """A DCGM series, narrowed to the pods of the job and labelled with its name.

    DCGM's exporter names the pod in exported_* labels, because its own pod has the plain ones. A pod has
    several ranks and several GPUs: the ranks are folded first, or the join would be many-to-many, and so it
    would where a pod names a second job.
    """
    owner = f"max by (namespace, pod, job_name) (zerotrain_rank_info{{{selector}}})"
    owner = f"topk by (namespace, pod) (1, {owner})"
    for label in ("namespace", "pod"):
        owner = f'label_replace({owner}, "exported_{label}", "$1", "{label}", "(.*)")'
    return f"{gpu_series} * on (exported_namespace, exported_pod) group_left (job_name) {owner}"


def _labels(by: str) -> str:
    return ", ".join(filter(None, ("namespace, job_name", by)))
