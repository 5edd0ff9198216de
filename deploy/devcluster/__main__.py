"""`python -m deploy.devcluster up|down`: what `make cluster-up` and `make cluster-down` call."""

from __future__ import annotations

import argparse
import sys

from deploy.devcluster import cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.devcluster", description=__doc__)
    parser.add_argument("verb", choices=["up", "down"])
    parser.add_argument("--name", default="dev")
    parser.add_argument("--profile", default="node", choices=["control-plane", "node", "simulated"])
    parser.add_argument("--cluster", default="devcluster", choices=["devcluster", "kind"])
    options, extra = parser.parse_known_args()
    is_kind = options.cluster == "kind"
    try:
        if options.verb == "down":
            (cluster.kind_down if is_kind else cluster.down)(options.name)
            return 0
        found = (
            cluster.kind_up(options.name)
            if is_kind
            else cluster.up(options.profile, options.name, extra=extra)
        )
    except cluster.ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"export KUBECONFIG={found.kubeconfig}")
    print(f"{' '.join(found.kubectl)} get nodes      # or your own kubectl")
    print(f"make cluster-down NAME={options.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
