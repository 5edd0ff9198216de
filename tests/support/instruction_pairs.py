"""Instructions of real text: the functions of Python's own standard library, and what their docstrings say.

`python -m tests.support.instruction_pairs FILE.jsonl [COUNT]` writes them.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

MODULES = ("textwrap", "shutil", "heapq", "bisect", "random", "statistics", "string", "tempfile", "glob")


def pairs() -> Iterator[dict[str, str]]:
    """Yield rows of prompt (signature) and completion (first line of the docstring)."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        for node in ast.walk(ast.parse((library / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                signature = f"def {node.name}({ast.unparse(node.args)}):\n"
                yield {"prompt": signature, "completion": text.splitlines()[0]}


def write_pairs(path: Path, count: int = 64) -> None:
    """Write the first `count` rows as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in islice(pairs(), count)))


if __name__ == "__main__":
    write_pairs(Path(sys.argv[1]), *map(int, sys.argv[2:]))
