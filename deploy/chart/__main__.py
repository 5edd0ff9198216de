"""`python -m deploy.chart`: writes the generated files of the chart.

`--check` only compares. `--package FOLDER` packs the chart; equal files give an equal archive.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deploy.chart.generate import CHART, differences, write
from deploy.chart.package import package
from deploy.devcluster.cluster import build_tool


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.chart", description=__doc__)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    ways.add_argument(
        "--package", type=Path, metavar="FOLDER", help="write zerotrain-VERSION.tgz into FOLDER"
    )
    options = parser.parse_args()
    if not options.check and options.package is None:
        write()
        return 0
    found = differences()
    for path in found:
        print(f"{path} is not what `python -m deploy.chart` writes", file=sys.stderr)
    if found or options.package is None:
        return 1 if found else 0
    print(package(CHART, options.package, helm=build_tool("helm") / "helm"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
