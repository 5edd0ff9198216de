"""`python -m deploy.dashboards`: writes dashboards/*.json from the description; `--check` only compares."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from deploy.dashboards.boards import BOARDS
from deploy.dashboards.render import board_json

FOLDER = Path(__file__).resolve().parents[2] / "dashboards"


def files() -> dict[str, str]:
    """Return the text of each dashboard file by its name."""
    return {f"{board.name}.json": json.dumps(board_json(board), indent=1) + "\n" for board in BOARDS}


def differences(folder: Path) -> list[str]:
    """Return one line for each difference between the description and the files of `folder`."""
    wanted = files()
    found = {path.name: path.read_text() for path in folder.glob("*.json")}
    return [
        *(f"{name}: not there" for name in wanted.keys() - found.keys()),
        *(f"{name}: nothing describes it" for name in found.keys() - wanted.keys()),
        *(f"{name}: differs" for name in wanted.keys() & found.keys() if wanted[name] != found[name]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    if parser.parse_args().check:
        for line in sorted(differences(FOLDER)):
            print(f"{line}; run: python -m deploy.dashboards", file=sys.stderr)
        return 1 if differences(FOLDER) else 0
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
