"""Conversion of text into the token ids of a model from a folder, by the folder's own `tokenizer.json`.

It needs the tokenizers library, which a worker may lack: then the ids must come in a `.bin` file. Every rank
tokenises the text at its start and keeps the ids, so this is for text of moderate size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from zerotrain.contract.strict_json import MAX_MODEL_CONFIG_BYTES, read_json
from zerotrain.runtime.data.corpus import SEPARATOR, ArrayCorpus, Corpus
from zerotrain.runtime.data.errors import DataError

MAX_TEXT_BYTES = 512 << 20
"""Largest text; with more, every rank would spend too long at its start."""

TOKENIZER = "tokenizer.json"

_READ_BYTES = 1 << 20
_DOCUMENTS = 256


def tokenized(corpus: Corpus, folder: Path, data_path: str) -> ArrayCorpus:
    """Return the ids of a text corpus; documents end with the model's end-of-text id where it has one.

    Raises DataError when there is no tokenizer or library, or too much text.
    """
    way_out = "or give token ids: a file such as corpus.uint32.bin"
    if corpus.num_tokens > MAX_TEXT_BYTES:
        raise DataError(
            f"data.path {data_path} has {corpus.num_tokens} bytes of text; up to {MAX_TEXT_BYTES} are "
            f"tokenised at the start; take less, {way_out}"
        )
    if not (folder / TOKENIZER).is_file():
        raise DataError(
            f"data.path {data_path} is text, but the model in {folder} has no {TOKENIZER} to make its ids; "
            f"add it, {way_out}"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(
            f"data.path {data_path} is text, and the model in {folder} reads ids of its own tokenizer; "
            f"install the tokenizers library in the worker's image, {way_out}"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{folder / TOKENIZER} cannot be read: {error}") from error
    end = _end_of_text(folder)
    parts: list[np.ndarray[tuple[int, ...], np.dtype[np.uint32]]] = []
    for texts in _batches(_documents(corpus)):
        for encoding in tokenizer.encode_batch(texts):
            has_end = end is None or encoding.ids[-1:] == [end]
            parts.append(np.asarray(encoding.ids if has_end else [*encoding.ids, end], dtype=np.uint32))
    ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)
    return ArrayCorpus(ids, fingerprint=(corpus.fingerprint, TOKENIZER, len(ids)), notices=corpus.notices)


def _documents(corpus: Corpus) -> Iterator[str]:
    """Yield the texts between separators."""
    left = b""
    for start in range(0, corpus.num_tokens, _READ_BYTES):
        count = min(_READ_BYTES, corpus.num_tokens - start)
        *whole, left = (left + corpus.read(start, count).astype(np.uint8).tobytes()).split(bytes([SEPARATOR]))
        yield from (part.decode(errors="replace") for part in whole if part)
    if left:
        yield left.decode(errors="replace")


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _DOCUMENTS:
            yield batch
            batch = []
    if batch:
        yield batch


def _model_config(folder: Path) -> dict[str, Any]:
    raw = read_json(folder / "config.json", max_bytes=MAX_MODEL_CONFIG_BYTES, follow_link=True, finite=False)
    return raw if isinstance(raw, dict) else {}


def _end_of_text(folder: Path) -> int | None:
    try:
        end = _model_config(folder).get("eos_token_id")
    except (OSError, ValueError):
        return None
    first = end[0] if isinstance(end, list) and end else end
    return first if isinstance(first, int) else None
