"""The custom resources of the Prometheus operator, as its Go module carries them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.crd import wait_established
from tests.support.devcluster import Cluster
from tests.support.go_module import downloaded

MODULE = "github.com/prometheus-operator/prometheus-operator@v0.93.1"
SUM = "h1:4Juk8v93RdG1DSGD/mGp+SeQKPmnlLIj2iq3blLZgFY="


def install_crds(cluster: Cluster, plurals: Sequence[str]) -> None:
    """Install these CRDs of monitoring.coreos.com/v1 and wait until they are served.

    5 MB are downloaded the first time.
    """
    folder = downloaded(MODULE, sum=SUM) / "example" / "prometheus-operator-crd"
    for plural in plurals:
        path = folder / f"monitoring.coreos.com_{plural}.yaml"
        cluster.kubectl("apply", "--server-side", "-f", str(path))
    for plural in plurals:
        wait_established(cluster, f"{plural}.monitoring.coreos.com")
