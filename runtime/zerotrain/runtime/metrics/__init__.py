"""Metrics that a worker exports to Prometheus.

`WorkerMetrics` is a rank's private registry; its snapshots are sent over the channel, and the launcher's
`MergedCollector` serves all ranks of the pod as one exposition. The definitions are in
`zerotrain.contract.metrics`. This package does not import torch.
"""

from zerotrain.runtime.metrics.families import Families
from zerotrain.runtime.metrics.merge import MergedCollector
from zerotrain.runtime.metrics.snapshot import restore, snapshot
from zerotrain.runtime.metrics.worker import OffloadSample, RankIdentity, StepSample, WorkerMetrics

__all__ = [
    "Families",
    "MergedCollector",
    "OffloadSample",
    "RankIdentity",
    "StepSample",
    "WorkerMetrics",
    "restore",
    "snapshot",
]
