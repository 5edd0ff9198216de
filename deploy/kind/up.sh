#!/usr/bin/env bash
# Starts a kind cluster and loads the host image into it: up.sh NAME
# Writes build/kind/NAME.kubeconfig and leaves ~/.kube/config alone.
set -euo pipefail

name=${1:?usage: up.sh NAME}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
image=$repository/build/devcluster/images/host.tar
kubeconfig=$repository/build/kind/$name.kubeconfig

for tool in docker kind; do
    if ! command -v "$tool" >/dev/null; then
        echo "error: $tool is not on PATH; install it, or leave CLUSTER unset to use the development cluster" >&2
        exit 1
    fi
done

"$repository/.venv/bin/python" "$repository/deploy/devcluster/build.py" image

mkdir -p "$(dirname "$kubeconfig")"
if ! kind get clusters 2>/dev/null | grep -qxF "$name"; then
    kind create cluster --name "$name" --config "$repository/deploy/kind/cluster.yaml" \
        --kubeconfig "$kubeconfig" --wait 180s
else
    kind export kubeconfig --name "$name" --kubeconfig "$kubeconfig"
fi
# docker-archive is a format that `kind load` takes as it is, without a `docker load` before.
kind load image-archive "$image" --name "$name"
echo "export KUBECONFIG=$kubeconfig"
