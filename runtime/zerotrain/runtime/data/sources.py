"""Opens the corpus of `data.path`: text, a folder of text, `.jsonl`, a `.bin` of token ids, Python's own
text.

Files are ordered by their relative paths, byte by byte, so that the order is the same on every machine.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from zerotrain.contract.strict_json import strict_json
from zerotrain.contract.train_spec import PYTHON_STDLIB
from zerotrain.runtime.data.corpus import ArrayCorpus, Corpus, TextCorpus, TextFile
from zerotrain.runtime.data.errors import DataError
from zerotrain.runtime.data.tokens import tokenized

PROBE_BYTES = 8192
"""Bytes that are read to detect a binary file: it has a zero byte among them."""

MAX_JSONL_BYTES = 512 << 20
"""Largest .jsonl file, which is decoded into memory; larger ones should be converted to text."""

TOKENS_SUFFIX = ".bin"

TEXT_FIELD = "text"

TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
"""Dtypes of a `.bin` file, read from its name: `corpus.uint16.bin`; uint16 when the name has none."""

MAX_NAMED = 3

_OFTEN_LEFT_OUT = frozenset({"test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"})


def with_tokenizer(corpus: Corpus, data_path: str, folder: str) -> Corpus:
    """Return the corpus for a model with a tokenizer of its own, in `folder`: text becomes that model's ids.

    Raises DataError when it cannot.
    """
    return corpus if data_path.endswith(TOKENS_SUFFIX) else tokenized(corpus, Path(folder), data_path)


def open_corpus(data_path: str) -> Corpus:
    """Return the corpus of `data_path`. Raises DataError naming the path, the rule and the remedy."""
    if data_path == PYTHON_STDLIB:
        return python_stdlib()
    path = Path(data_path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _folder(path, suffix=None)
        if not stat.S_ISREG(mode):
            raise DataError(f"data.path {data_path} is neither a file nor a folder")
        if path.suffix == TOKENS_SUFFIX:
            return _token_ids(path)
        if path.suffix == ".jsonl":
            return _jsonl(path)
        return _single(path)
    except FileNotFoundError as error:
        raise DataError(
            f"data.path {error.filename or data_path} does not exist in the worker; "
            "mount the volume or correct it"
        ) from error
    except OSError as error:
        raise DataError.unreadable(f"data.path {error.filename or data_path}", error) from error


def python_stdlib() -> TextCorpus:
    """Return the .py files of the running Python's standard library, without installed packages, and without
    the parts that distributions and images often leave out: so the text is the same on a machine and in a
    container."""
    return _folder(Path(sysconfig.get_paths()["stdlib"]), suffix=".py", without=_OFTEN_LEFT_OUT)


def _single(path: Path) -> TextCorpus:
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"data.path {path} is empty")
    if _is_binary(path):
        raise DataError(
            f"data.path {path} is not text (it has zero bytes); name a file of token ids `*.<dtype>.bin`"
        )
    return TextCorpus([TextFile(path=path, size=size)], root=path.parent)


def _folder(root: Path, *, suffix: str | None, without: frozenset[str] = frozenset()) -> TextCorpus:
    files, binary = [], []
    for path in _walk(root):
        if suffix is not None and path.suffix != suffix:
            continue
        if without.intersection(path.relative_to(root).parts[:-1]):
            continue
        size = path.stat().st_size
        if size == 0:
            continue
        if _is_binary(path):
            binary.append(os.path.relpath(path, root))
        else:
            files.append(TextFile(path=path, size=size))
    notices = (_skipped(binary),) if binary else ()
    if not files:
        detail = f" ({notices[0]})" if notices else ""
        raise DataError(f"data.path {root} holds no text{detail}; put text files there or correct the path")
    return TextCorpus(files, root=root, notices=notices)


def _walk(root: Path) -> Iterator[Path]:
    """Yield the regular files below `root`, by path, without hidden names, installed packages and linked
    folders."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for folder, names, files in os.walk(root, onerror=fail):
        # Linked folders are not followed (loops); linked files are, as a mounted ConfigMap links its files.
        names[:] = [name for name in names if not _passed_over(name)]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    yield from (path for path in sorted(found, key=lambda path: os.fsencode(path)) if path.is_file())


def _passed_over(folder: str) -> bool:
    return folder.startswith(".") or folder in ("__pycache__", "site-packages", "dist-packages")


def _is_binary(path: Path) -> bool:
    with open(path, "rb") as file:
        return b"\0" in file.read(PROBE_BYTES)


def _skipped(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"skipped {len(names)} binary files: {', '.join(names[:MAX_NAMED])}{more}"


def _token_ids(path: Path) -> ArrayCorpus:
    named = Path(path.stem).suffix.lstrip(".")
    dtype = np.dtype(named if named in TOKEN_DTYPES else "uint16")
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise DataError(
            f"data.path {path} has {size} bytes, which is no whole number of {dtype.name} token ids; "
            f"say the dtype in the name, such as corpus.uint32.bin ({', '.join(TOKEN_DTYPES)})"
        )
    ids = np.memmap(path, dtype=dtype, mode="r")
    return ArrayCorpus(ids, fingerprint=(path.name, size, dtype.name))


def _jsonl(path: Path) -> ArrayCorpus:
    size = path.stat().st_size
    if size > MAX_JSONL_BYTES:
        raise DataError(
            f"data.path {path} has {size} bytes; a .jsonl may have {MAX_JSONL_BYTES}: "
            "convert it to text files"
        )
    parts: list[bytes] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                parts += [_text_of(line, f"{path}:{number}"), b"\0"]
    if not parts:
        raise DataError(f"data.path {path} is empty")
    return ArrayCorpus(np.frombuffer(b"".join(parts), dtype=np.uint8), fingerprint=(path.name, size))


def _text_of(line: bytes, where: str) -> bytes:
    try:
        record = strict_json(line, max_bytes=MAX_JSONL_BYTES, finite=False)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    text = record.get(TEXT_FIELD) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where} has no string under "{TEXT_FIELD}"')
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f'{where}: "{TEXT_FIELD}" holds half of a surrogate pair ({text[error.start]!r}), '
            "which is no text; write the file again with whole characters"
        ) from error
