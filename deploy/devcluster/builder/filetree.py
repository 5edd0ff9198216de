"""Selection of this machine's files for an image, in which they keep their paths.

Symbolic links are kept as links wherever they occur in a path (`/lib64`, `python3`, a merged `/usr`),
together with their targets, so that every path that works here works in the image.
"""

import hashlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from .archive import LayerEntry
from .errors import BuildError

_MAX_SCRIPT_BYTES = 1 << 16
_MAX_LINKS = 40  # the kernel's own limit for one path

Skip = Callable[[os.DirEntry[str]], bool]
"""Predicate that keeps a directory entry, and all below it, out of the image."""


@dataclass(frozen=True, slots=True)
class Node:
    """One path of the tree: a folder, a link, a file of this machine, or bytes of the builder."""

    mode: int
    is_folder: bool = False
    link_to: str | None = None
    source: str | None = None
    body: bytes | None = None
    size: int = 0
    modified_ns: int = 0

    def fingerprint(self) -> bytes:
        """Return bytes that change when the node changes.

        A file of this machine is compared by size and time, not read.
        """
        body = hashlib.sha256(self.body).hexdigest() if self.body is not None else ""
        return repr((self.mode, self.is_folder, self.link_to, body, self.size, self.modified_ns)).encode()


@dataclass
class FileTree:
    """The paths of one layer."""

    nodes: dict[str, Node] = field(default_factory=dict)

    def add(self, path: str) -> str:
        """Add one file, folder (without its contents) or link, all its parents, and all that a link leads to.

        Returns the path without links. Raises FileNotFoundError if the path or a link's target is missing.
        """
        real, parts, links = "/", deque(_parts(path)), 0
        while parts:
            name = parts.popleft()
            if name == "..":
                real = os.path.dirname(real)
                continue
            here = os.path.join(real, name)
            status = os.lstat(here)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > _MAX_LINKS:
                    raise BuildError(f"{path} has more than {_MAX_LINKS} symbolic links in it; is it a loop?")
                target = os.readlink(here)
                self.nodes[here] = Node(mode=0o777, link_to=target)
                parts.extendleft(reversed(_parts(target)))
                real = "/" if target.startswith("/") else real
                continue
            self._put(here, status)
            real = here
        return real

    def add_tree(self, root: str, skip: Skip) -> None:
        """Add a folder and everything below it that is not skipped."""
        pending = [self.add(root)]
        while pending:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if skip(entry):
                        continue
                    if entry.is_symlink():
                        self._add_link(entry.path)
                    elif entry.is_dir():
                        self._put(entry.path, entry.stat())
                        pending.append(entry.path)
                    else:
                        self._put(entry.path, entry.stat())

    def drop_empty_folders(self, root: str) -> None:
        """Remove the folders below this one that hold no file."""
        used = {
            str(folder)
            for path, node in self.nodes.items()
            if not node.is_folder
            for folder in Path(path).parents
        }
        for path, node in list(self.nodes.items()):
            if node.is_folder and _is_in(path, root) and path not in used:
                del self.nodes[path]

    def add_folder(self, path: str, *, mode: int = 0o755) -> None:
        """Add an empty folder that exists only in the image, and its parents."""
        self._add_parents(path)
        self.nodes[path] = Node(mode=mode, is_folder=True)

    def add_bytes(self, path: str, body: bytes, *, mode: int = 0o644) -> None:
        """Add a file that exists only in the image."""
        self._add_parents(path)
        self.nodes[path] = Node(mode=mode, body=body, size=len(body))

    def drop_folders_of(self, lower: "FileTree") -> None:
        """Remove the folders that a lower layer has: repeating one would change its mode (`/tmp`)."""
        for path, node in list(self.nodes.items()):
            if node.is_folder and path in lower.nodes:
                del self.nodes[path]

    def move(self, old: str, new: str) -> None:
        """Move a folder to another path of the image: its paths, links into it, and scripts' first lines."""
        moved = {path: node for path, node in self.nodes.items() if _is_in(path, old)}
        for path in moved:
            del self.nodes[path]
        for path, node in moved.items():
            self.nodes[new + path.removeprefix(old)] = _with_interpreter(path, node, old, new)
        for path, node in self.nodes.items():
            if node.link_to is not None and _is_in(node.link_to, old):
                self.nodes[path] = replace(node, link_to=new + node.link_to.removeprefix(old))
        if moved:
            self._add_parents(new)
            self._drop_empty_parents(old)

    def fingerprint(self) -> str:
        """Return a hash of all paths and of their known properties, without reading the files.

        Compiled Python files do not count: they follow from their sources and appear when a module is
        imported.
        """
        digest = hashlib.sha256()
        for path in sorted(path for path in self.nodes if "/__pycache__" not in path):
            digest.update(path.encode(errors="surrogateescape") + b"\0" + self.nodes[path].fingerprint())
        return digest.hexdigest()

    def entries(self, on_entry: Callable[[str], None] = lambda _: None) -> Iterator[LayerEntry]:
        """Yield the entries in path order, so that a folder comes before its contents."""
        for path in sorted(self.nodes):
            node = self.nodes[path]
            on_entry(path)
            if node.source is None:
                yield LayerEntry(
                    path=path, mode=node.mode, is_folder=node.is_folder, link_to=node.link_to, body=node.body
                )
            else:
                # A compiled Python file records its source's time in whole seconds; it would be stale with
                # another time.
                seconds = node.modified_ns // 1_000_000_000
                yield LayerEntry(path=path, mode=node.mode, source=Path(node.source), modified_s=seconds)

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(node.size for node in self.nodes.values())

    def _add_link(self, path: str) -> None:
        target = os.path.realpath(path)
        if os.path.isdir(target):
            # Its target is either in the tree that is being walked, or must not be included.
            self.nodes[path] = Node(mode=0o777, link_to=os.readlink(path))
        elif os.path.exists(target):
            self.add(path)

    def _add_parents(self, path: str) -> None:
        for parent in list(Path(path).parents)[:-1]:  # the root itself is no entry of a layer
            self.nodes.setdefault(str(parent), Node(mode=0o755, is_folder=True))

    def _drop_empty_parents(self, path: str) -> None:
        for parent in list(Path(path).parents)[:-1]:
            if any(other.startswith(f"{parent}/") for other in self.nodes):
                return
            self.nodes.pop(str(parent), None)

    def _put(self, path: str, status: os.stat_result) -> None:
        # World-readable, whatever its mode is here (a home folder is 0700): the user of the pods owns no file
        # of the image.
        if stat.S_ISDIR(status.st_mode):
            self.nodes.setdefault(path, Node(mode=0o755, is_folder=True))
        elif stat.S_ISREG(status.st_mode):
            mode = 0o755 if status.st_mode & 0o111 else 0o644
            self.nodes[path] = Node(
                mode=mode, source=path, size=status.st_size, modified_ns=status.st_mtime_ns
            )


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _with_interpreter(path: str, node: Node, old: str, new: str) -> Node:
    """Replace the interpreter path of a script in `bin` from `old` to `new`; return other nodes unchanged."""
    if os.path.basename(os.path.dirname(path)) != "bin" or not node.size or node.size > _MAX_SCRIPT_BYTES:
        return node
    body = Path(node.source).read_bytes() if node.source is not None else node.body or b""
    head = f"#!{old}/".encode()
    if not body.startswith(head):
        return node
    changed = f"#!{new}/".encode() + body.removeprefix(head)
    return Node(mode=node.mode, body=changed, size=len(changed))


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
