"""The rows of a fine-tuning: JSONL, Parquet, a folder of `datasets`, or a data set of the hub."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

from zerotrain.compat.finetune.hub import check_name
from zerotrain.compat.refusal import CompatError
from zerotrain.contract.finetune_spec import FinetuneSpec
from zerotrain.contract.strict_json import strict_json

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
MAX_TEXT = 300
"""Characters of a library's error that are shown."""
SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a folder that `save_to_disk` of `datasets` wrote."""

TRAIN = "train"
SPLITS = {
    TRAIN: {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
"""Splits, and the words in the names of files and folders by which `datasets` knows them."""

KINDS = (("prompt", "completion"), ("messages",), ("text",))
"""Columns of the kinds of rows."""
WITH_MESSAGES = ("tools", "chat_template_kwargs")
"""Columns that TRL gives to the chat template, where the rows have them."""

MESSAGES = "a list of messages with role and content"
TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "messages": (MESSAGES, (list,)),
    "text": ("a text", (str,)),
}
"""Name and types of the values of columns that are not of `ANY_TYPE`."""
ANY_TYPE = f"a text or {MESSAGES}", (str, list)


def load_rows(spec: FinetuneSpec) -> tuple[Any, Any]:
    """Return the rows for training, and those for evaluation or None. Raises CompatError that names the field
    and what is wrong with its value."""
    rows = _load(spec, "data", spec.data)
    if spec.eval is None:
        return rows, None
    if spec.eval.data is not None:
        return rows, _load(spec, "eval.data", spec.eval.data)
    assert spec.eval.share is not None
    if math.ceil(spec.eval.share * len(rows)) >= len(rows):
        raise CompatError(
            f"spec.finetune.eval.share: {spec.eval.share} of the {len(rows)} row(s) of {spec.data} leaves "
            "none for training; lower it, give more rows, or rows of their own as eval.data"
        )
    parts = rows.train_test_split(test_size=spec.eval.share, seed=spec.seed)
    return parts["train"], parts["test"]


def losses_of(spec: FinetuneSpec, columns: list[str]) -> dict[str, bool | None]:
    """Return the options of SFTConfig that say which tokens count in the loss. Raises CompatError."""
    if not spec.completion_only:
        return {"completion_only_loss": spec.completion_only}
    if "messages" in columns:
        return {"assistant_only_loss": True}
    if "completion" not in columns:
        raise CompatError(
            f"spec.finetune.completionOnly: the rows have no completions ({', '.join(columns)}); give rows "
            "with prompt and completion, or messages, or remove completionOnly"
        )
    return {"completion_only_loss": True}


def check_rows(spec: FinetuneSpec) -> None:
    """Raise CompatError if a file or folder of rows is not there."""
    named = {"data": spec.data, "eval.data": spec.eval.data if spec.eval else None}
    for field, source in named.items():
        if source is not None and source.startswith("/") and not Path(source).exists():
            raise CompatError(
                f"spec.finetune.{field}: there is no {source} in the worker; mount it with "
                "podTemplate.volumes"
            )


def _load(spec: FinetuneSpec, field: str, source: str) -> Any:
    # Imported late: the alias must be there before.
    import datasets

    try:
        rows = _read(field, source)
    # Of an empty file datasets ends an iteration.
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        check_name(spec, field, source, "dataset", error)
        _check_not_empty(field, source, any(file.read_bytes().strip() for file in _files(Path(source))))
        reason = _bad_line(Path(source)) or _first(error)
        raise CompatError(
            f"spec.finetune.{field}: {source} cannot be read: {reason}; give JSONL, Parquet, a folder of "
            "datasets' save_to_disk, or a name on the hub that the job may reach"
        ) from error
    _check_not_empty(field, source, len(rows) > 0)
    columns = rows.column_names
    kind = next((kind for kind in KINDS if set(kind) <= set(columns)), None)
    if kind is None:
        raise CompatError(
            f"spec.finetune.{field}: the rows of {source} have {', '.join(columns)}; they need prompt and "
            "completion, or messages, or text"
        )
    _check_values(field, source, rows.select_columns(list(kind)))
    # By other columns, such as prompt beside text, or labels, TRL would take the rows for another kind.
    return rows.select_columns([*kind, *(column for column in WITH_MESSAGES if column in columns)])


def _check_not_empty(field: str, source: str, has_rows: bool) -> None:
    if not has_rows:
        raise CompatError(f"spec.finetune.{field}: {source} has no rows; name a file or folder that has some")


def _first(error: BaseException) -> str:
    """Return the text of the error that came first of those that led to this one, on one line."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return " ".join(str(error).split())[:MAX_TEXT]


def _check_values(field: str, source: str, rows: Any) -> None:
    """Raise CompatError that names the first row with a value of another type, or none."""
    for column in rows.column_names:
        what, types = TYPES.get(column, ANY_TYPE)
        kept = rows.data.column(column)
        _check_text(field, source, column, kept)
        if _are_good(kept, types):
            continue
        for number, value in enumerate(rows[column], start=1):
            if not _is_good(value, types):
                raise CompatError(
                    f"spec.finetune.{field}: row {number} of {source} has {value!r:.80} as {column}; give "
                    f"{what} in every row, or remove the row"
                )


def _check_text(field: str, source: str, column: str, kept: Any) -> None:
    """Raise CompatError if a text is no UTF-8, which datasets does not look at, or if there is none to
    learn."""
    pyarrow, compute = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.compute"))
    try:
        kept.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        reason = _bad_line(Path(source)) or error
        raise CompatError(
            f"spec.finetune.{field}: {source} cannot be read: {reason}; write it as UTF-8"
        ) from error
    is_text = pyarrow.types.is_string(kept.type) or pyarrow.types.is_large_string(kept.type)
    if column != "prompt" and is_text and not compute.max(compute.binary_length(kept)).as_py():
        raise CompatError(
            f"spec.finetune.{field}: every {column} of {source} is empty; give rows that a model can learn"
        )


def _are_good(kept: Any, types: tuple[type, ...]) -> bool:
    """Return whether a column's form in Arrow says that all of its values are good: nobody looks at millions
    of rows one by one."""
    pyarrow, compute = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.compute"))
    if kept.null_count:
        return False
    if pyarrow.types.is_string(kept.type) or pyarrow.types.is_large_string(kept.type):
        return str in types
    is_list = pyarrow.types.is_list(kept.type) or pyarrow.types.is_large_list(kept.type)
    if list not in types or not is_list or not pyarrow.types.is_struct(kept.type.value_type):
        return False
    if kept.type.value_type.get_field_index("role") < 0:
        return False
    roles = compute.struct_field(compute.list_flatten(kept), "role")
    return not roles.null_count and compute.min(compute.list_value_length(kept)).as_py() > 0


def _is_good(value: Any, types: tuple[type, ...]) -> bool:
    if isinstance(value, list):
        return list in types and bool(value) and all(_is_message(item) for item in value)
    return isinstance(value, str) and str in types


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str)


def _bad_line(source: Path) -> str:
    """Return place and fault of the first line of JSON that cannot be read; empty if there is none."""
    for file in _files(source):
        data = file.read_bytes() if READERS.get(file.suffix) == "json" and os.access(file, os.R_OK) else b""
        if data.startswith(b"["):  # one array
            continue
        for number, line in enumerate(data.splitlines(), start=1):
            try:
                value = strict_json(line.strip() or b"{}", max_bytes=len(line) + 2, unique_keys=True)
                json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
            except ValueError as error:
                return f"line {number} of {file} {error}"
    return ""


def _files(source: Path) -> list[Path]:
    """Return the file, or the files of the folder that may hold rows; none for a name on the hub."""
    if source.is_dir():
        # Editors keep copies in hidden folders.
        found = (item for item in source.rglob("*") if item.suffix in READERS)
        return sorted(
            item for item in found if not any(part[0] == "." for part in item.relative_to(source).parts)
        )
    return [source] if source.is_absolute() else []


def _read(field: str, source: str) -> Any:
    import datasets

    if not source.startswith("/"):
        return datasets.load_dataset(source, split="train")
    path = Path(source)
    if path.is_dir() and any((path / name).exists() for name in SAVED):
        saved = datasets.load_from_disk(source)
        if not isinstance(saved, datasets.DatasetDict):
            return saved
        if "train" not in saved:
            raise CompatError(
                f"spec.finetune.{field}: of the splits of {source} ({', '.join(saved)}) none is named train; "
                "name the folder of one split"
            )
        return saved["train"]
    files = _files(path)
    kinds = {READERS.get(item.suffix) for item in files}
    if len(kinds) != 1 or None in kinds:
        raise CompatError(
            f"spec.finetune.{field}: {source} is not of one kind; give files of one of {', '.join(READERS)}, "
            "or a folder of datasets' save_to_disk"
        )
    named = [str(item) for item in _of_one_split(field, path, files)]
    return datasets.load_dataset(str(kinds.pop()), data_files=named, split="train")


def _of_one_split(field: str, folder: Path, files: list[Path]) -> list[Path]:
    """Return the files of the split train, where their names say that there are others, as `datasets` does of
    a name on the hub. Raises CompatError where there are several others and no train."""
    splits = {file: _split_of(file.relative_to(folder)) for file in files} if folder.is_dir() else {}
    others = {split for split in splits.values() if split != TRAIN}
    chosen = [file for file, split in splits.items() if split == TRAIN]
    if not others or (not chosen and len(others) == 1):
        return files
    if not chosen:
        raise CompatError(
            f"spec.finetune.{field}: of the splits of {folder} ({', '.join(sorted(others))}) none is named "
            "train; name the file or folder of one split"
        )
    if os.environ.get("RANK", "0") == "0":
        print(
            f"zerotrain.compat: spec.finetune.{field}: {len(files) - len(chosen)} of {len(files)} files of "
            f"{folder} are left out: their names say {', '.join(sorted(others))}",
            file=sys.stderr,
        )
    return chosen


def _split_of(place: Path) -> str:
    """Return the split that a file's name and folders say, train if they say none."""
    words = set(re.split("[^a-z]+", str(place).lower()))
    said = [split for split, names in SPLITS.items() if words & names]
    return TRAIN if TRAIN in said or not said else said[0]
