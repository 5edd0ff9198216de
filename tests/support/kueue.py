"""A real Kueue beside a cluster: its controllers as a process, with its own custom resources and webhooks."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.support.certificates import certificate
from tests.support.crd import wait_established
from tests.support.devcluster import REPOSITORY, Cluster, wait_until
from tests.support.go_module import required
from tests.support.ports import free_port

GROUP = "kueue.x-k8s.io"
CERTS = Path("/etc/kueue/metrics/certs")
"""The only folder in which Kueue looks for certificates that it does not make itself.

It can make them only with a kubelet that mounts a Secret.
"""
TOOL = REPOSITORY / "deploy" / "tools" / "kueue"
Json = dict[str, Any]


@contextmanager
def kueue_running(program: Path, cluster: Cluster, folder: Path, **configuration: Json) -> Iterator[None]:
    """Install Kueue in the cluster and run it for the length of the block, with this extra configuration.

    It is set up as its documentation says for an external framework. A folder of this test takes the place of
    /etc for it.
    """
    module = required("sigs.k8s.io/kueue", by=TOOL)
    _install_crds(cluster, module / "config" / "components" / "crd" / "bases")
    certs, port, log = folder / "etc" / CERTS.relative_to("/etc"), free_port(), folder / "kueue.log"
    certs.mkdir(parents=True)
    authority, _ = certificate(certs, "tls", days=1)
    config = folder / "kueue.yaml"
    config.write_text(json.dumps({**_configuration(port), **configuration}))
    command = [str(program), "--config", str(config), "--kubeconfig", str(cluster.kubeconfig)]
    private = ["unshare", "-rm", "sh", "-c", 'mount --bind "$0" /etc && exec "$@"', str(folder / "etc")]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*private, *command, "--feature-gates=VisibilityOnDemand=false"], stdout=output, stderr=output
        )
    try:
        _register_webhooks(cluster, module, f"https://127.0.0.1:{port}", authority.read_bytes())
        wait_until(lambda: _serves(process, cluster, log), "Kueue to take a ResourceFlavor", every_s=0.5)
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def kueues(kind: str, name: str, spec: Json) -> Json:
    """Return one object of Kueue's own kinds."""
    return {"apiVersion": f"{GROUP}/v1beta2", "kind": kind, "metadata": {"name": name}, "spec": spec}


@contextmanager
def team_namespace(cluster: Cluster, flavor: str, *, cpu: int, memory: str, **spec: Json) -> Iterator[str]:
    """Provide a namespace whose LocalQueue `team-a` has so much of the flavor; remove its jobs at the end."""
    with cluster.namespace() as name:
        quotas = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": memory}]
        flavors = [{"name": flavor, "resources": quotas}]
        selector = {"matchLabels": {"kubernetes.io/metadata.name": name}}
        groups = [{"coveredResources": ["cpu", "memory"], "flavors": flavors}]
        queue = {"namespaceSelector": selector, "resourceGroups": groups, **spec}
        cluster.apply(kueues("ClusterQueue", name, queue))
        cluster.apply(kueues("LocalQueue", "team-a", {"clusterQueue": name}), namespace=name)
        yield name
        cluster.kubectl("delete", "ztj", "--all", "-n", name)


def _configuration(port: int) -> Json:
    """Return the shipped configuration without what a pod has: certificates, addresses, a lease."""
    return {
        "apiVersion": f"config.{GROUP}/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(CERTS)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {
            "frameworks": ["batch/job", "pod"],
            "externalFrameworks": ["ZeroTrainingJob.v1alpha1.zerotrain.dev"],
        },
    }


def _install_crds(cluster: Cluster, folder: Path) -> None:
    cluster.kubectl("apply", "--server-side", "-f", str(folder))
    wait_established(
        cluster, *(f"{path.stem.split('_')[1]}.{GROUP}" for path in sorted(folder.glob("*.yaml")))
    )


def _register_webhooks(cluster: Cluster, module: Path, url: str, authority: bytes) -> None:
    """Register the webhooks for Kueue's own kinds by address, as there is no Service without pods."""
    manifests = module / "config" / "components" / "webhook" / "manifests.yaml"
    for document in yaml.safe_load_all(manifests.read_text()):
        kept = [hook for hook in document["webhooks"] if hook["rules"][0]["apiGroups"] == [GROUP]]
        assert kept, f"{manifests} has no webhook for {GROUP}"
        for hook in kept:
            path = hook["clientConfig"].pop("service")["path"]
            hook["clientConfig"] = {
                "url": f"{url}{path}",
                "caBundle": base64.b64encode(authority).decode(),
            }
        cluster.apply({**document, "webhooks": kept})


def _serves(process: subprocess.Popen[bytes], cluster: Cluster, log: Path) -> bool:
    """Return whether Kueue's webhooks answer, which they do once its controllers run."""
    assert process.poll() is None, f"Kueue ended:\n{log.read_text()[-4000:]}"
    probe = {"apiVersion": f"{GROUP}/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "probe"}}
    done = cluster.kubectl("apply", "-f", "-", input=json.dumps(probe), check=False)
    return done.returncode == 0
