"""Data that can be trained on, and the named error for all other data."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zerotrain.contract.config import BatchConfig
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.train_spec import PYTHON_STDLIB
from zerotrain.runtime.data import Corpus, DataError, Shape, TokenLoader, open_corpus


def text_of(corpus: Corpus) -> bytes:
    return bytes(corpus.read(0, corpus.num_tokens).astype(np.uint8))


@pytest.mark.unit
def test_folder_is_read_recursively_in_path_order_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden", ".git/config", "empty"):
        (tmp_path / name).write_bytes(b"" if name == "empty" else name.encode())
    assert text_of(open_corpus(str(tmp_path))) == b"a.txt\0b.txt\0sub/c.txt\0"


@pytest.mark.unit
def test_binary_files_of_a_folder_are_skipped_with_a_notice(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\0\0")
    corpus = open_corpus(str(tmp_path))
    assert text_of(corpus) == b"text\0"
    assert corpus.notices == ("skipped 1 binary files: photo.jpg",)


@pytest.mark.unit
def test_standard_library_is_real_text() -> None:
    corpus = open_corpus(PYTHON_STDLIB)
    assert corpus.num_tokens > 3_000_000
    assert corpus.num_tokens == open_corpus(PYTHON_STDLIB).num_tokens
    assert b"site-packages" not in corpus.fingerprint.encode()


@pytest.mark.unit
def test_token_ids_with_dtype_in_the_name(tmp_path: Path) -> None:
    ids = np.array([1, 70000, 3], dtype=np.uint32)
    ids.tofile(tmp_path / "corpus.uint32.bin")
    assert open_corpus(str(tmp_path / "corpus.uint32.bin")).read(1, 2).tolist() == [70000, 3]
    ids.astype(np.uint16).tofile(tmp_path / "corpus.bin")
    assert open_corpus(str(tmp_path / "corpus.bin")).read(0, 1).tolist() == [1]


@pytest.mark.unit
def test_jsonl_text_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in ("one", "zwö")) + "\n\n")
    assert text_of(open_corpus(str(path))) == "one\0zwö\0".encode()


def _missing(folder: Path) -> str:
    return str(folder / "nowhere")


def _empty_file(folder: Path) -> str:
    (folder / "empty.txt").touch()
    return str(folder / "empty.txt")


def _empty_folder(folder: Path) -> str:
    return str(folder)


def _only_binary(folder: Path) -> str:
    (folder / "x.o").write_bytes(b"\0" * 10)
    return str(folder)


def _binary_file(folder: Path) -> str:
    (folder / "x.o").write_bytes(b"\0" * 10)
    return str(folder / "x.o")


def _uneven_bin(folder: Path) -> str:
    (folder / "x.uint32.bin").write_bytes(b"12345")
    return str(folder / "x.uint32.bin")


def _bad_json(folder: Path) -> str:
    (folder / "x.jsonl").write_text('{"text": "ok"}\n{"text": 3}\n')
    return str(folder / "x.jsonl")


def _lone_surrogate(folder: Path) -> str:
    (folder / "s.jsonl").write_text('{"text": "ok"}\n{"text": "half \\ud800"}\n')
    return str(folder / "s.jsonl")


def _fifo(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_missing, "does not exist in the worker"),
        (_empty_file, "is empty"),
        (_empty_folder, "holds no text"),
        (_only_binary, "skipped 1 binary files: x.o"),
        (_binary_file, "is not text"),
        (_uneven_bin, "no whole number of uint32"),
        (_bad_json, 'x.jsonl:2 has no string under "text"'),
        (_lone_surrogate, 's.jsonl:2: "text" holds half of a surrogate pair'),
        (_fifo, "neither a file nor a folder"),
    ],
)
def test_bad_data_has_a_named_error(tmp_path: Path, make: object, message: str) -> None:
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(DataError) as caught:
        open_corpus(path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.exit_code == ExitCode.BAD_DATA


SHAPE = Shape(
    rank=0,
    world_size=1,
    batch=BatchConfig(train_batch_size=2, micro_batch_size=2, gradient_accumulation_steps=1),
    context=8,
)


@pytest.mark.unit
def test_too_short_and_foreign_token_ids(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("1234567")
    with pytest.raises(DataError, match="has 8 tokens but one sample needs 9"):
        TokenLoader(open_corpus(str(tmp_path)), SHAPE, seed=0)
    np.full(100, 300, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    loader = TokenLoader(open_corpus(str(tmp_path / "ids.bin")), SHAPE, seed=0, vocabulary=256)
    with pytest.raises(DataError, match="token id 300 is outside the model's vocabulary of 256"):
        list(loader.step_batches())


@pytest.mark.unit
def test_file_that_shrinks_during_the_run_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    corpus = open_corpus(str(path))
    path.write_text("x" * 10)
    with pytest.raises(DataError, match="fewer than its 100 bytes"):
        corpus.read(0, 50)


@pytest.mark.ranks
def test_unreadable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o700)
    (tmp_path / "locked" / "a.txt").write_text("text")
    tmp_path.chmod(0o755)
    program = (
        "import os, sys\n"
        "from zerotrain.runtime.data import open_corpus, DataError\n"
        "os.getuid() or os.setuid(65534)\n"  # root may read everything
        "try: open_corpus(sys.argv[1])\n"
        "except DataError as error: print(error)\n"
    )
    (tmp_path / "locked").chmod(0o000 if os.getuid() else 0o700)
    # The parents of pytest's folder are private to this user, so pass the folder as the working directory.
    result = subprocess.run(
        [sys.executable, "-c", program, "locked"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (tmp_path / "locked").chmod(0o700)
    assert result.stdout == "data.path locked cannot be read: Permission denied\n"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("code", "ends_with"),
    [
        (errno.EIO, ExitCode.STORAGE_FAILED),
        (errno.ESTALE, ExitCode.STORAGE_FAILED),
        (errno.ETIMEDOUT, ExitCode.STORAGE_FAILED),
        (errno.EACCES, ExitCode.BAD_DATA),
        (errno.ENOENT, ExitCode.BAD_DATA),
    ],
    ids=str,
)
def test_a_volume_that_fails_is_not_the_users(code: int, ends_with: ExitCode) -> None:
    found = DataError.unreadable("data file /data/a.txt", OSError(code, os.strerror(code)))
    assert found.exit_code is ends_with
    assert str(found) == f"data file /data/a.txt cannot be read: {os.strerror(code)}"
    assert DataError("other").exit_code is ExitCode.BAD_DATA
