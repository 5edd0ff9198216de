"""What a worker exports to Prometheus.

`WorkerMetrics` is a rank's private registry; its snapshots travel over the channel, and the launcher's
`MergedCollector` serves all ranks of the pod as one exposition. Nothing here imports torch.
"""

from zerotrain.runtime.metrics.catalogue import CATALOGUE, MetricSpec
from zerotrain.runtime.metrics.merge import MergedCollector
from zerotrain.runtime.metrics.snapshot import restore, snapshot
from zerotrain.runtime.metrics.worker import RankIdentity, StepSample, WorkerMetrics

__all__ = [
    "CATALOGUE",
    "MergedCollector",
    "MetricSpec",
    "RankIdentity",
    "StepSample",
    "WorkerMetrics",
    "restore",
    "snapshot",
]
