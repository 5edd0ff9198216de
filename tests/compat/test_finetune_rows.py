"""Rows of a fine-tuning: files and folders that are read alike, and errors that name the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerotrain.compat.finetune.rows import load_rows
from zerotrain.compat.refusal import CompatError
from zerotrain.contract.finetune_spec import FinetuneSpec

pytestmark = pytest.mark.ranks

ROWS: list[dict[str, Any]] = [
    {"prompt": f"red {number}", "completion": f"green {number}"} for number in range(6)
]
TURNS = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "green"}]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def read(source: Path) -> Any:
    spec = FinetuneSpec(
        model="/x", data=str(source), method="full", learning_rate=1e-3, batch_size=1, max_length=8, steps=1
    )
    return load_rows(spec)[0]


def lines(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_every_form_gives_the_same_rows(tmp_path: Path) -> None:
    import datasets

    for form in ("several", "parquet"):
        (tmp_path / form).mkdir()
    lines(tmp_path / "several" / "a.jsonl", ROWS[:4])
    lines(tmp_path / "several" / "b.jsonl", ROWS[4:])
    datasets.Dataset.from_list(ROWS[:4]).to_parquet(tmp_path / "parquet" / "a.parquet")
    datasets.Dataset.from_list(ROWS[4:]).to_parquet(tmp_path / "parquet" / "b.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (tmp_path / "array.json").write_text(json.dumps(ROWS))
    lines(tmp_path / "one.jsonl", ROWS)
    for form in ("one.jsonl", "array.json", "several", "parquet", "saved"):
        assert read(tmp_path / form).to_list() == ROWS, form


@pytest.mark.parametrize(
    "row",
    [{"messages": TURNS}, {"text": "red"}, {"prompt": TURNS[:1], "completion": TURNS[1:]}],
    ids=["messages", "text", "conversation"],
)
def test_every_kind_of_row_is_taken(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(lines(tmp_path / "rows.jsonl", [row, row])).to_list() == [row, row]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROWS[0], {"prompt": "red"}], "row 2 of {} has None as completion; give a text or a list"),
        ([ROWS[0], {"prompt": "red", "completion": 7}], "row 2 of {} has 7 as completion; give a text or"),
        ([{"text": "red"}, {"text": TURNS}], "row 2 of {} has "),
        ([{"messages": TURNS}, {"messages": None}], "row 2 of {} has None as messages; give a list of mess"),
        ([{"messages": "red"}], "row 1 of {} has 'red' as messages"),
        ([{"question": "red"}], "the rows of {} have question; they need prompt and completion, or"),
    ],
    ids=["missing", "number", "text-or-list", "null", "type", "columns"],
)
def test_a_bad_row_is_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    file = lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(CompatError) as refused:
        read(file)
    assert f"spec.finetune.data: {message.format(file)}" in str(refused.value)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    lines(folder / "a.jsonl", ROWS)
    (folder / "b.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"prompt": "red", "completion": \n')
    with pytest.raises(CompatError, match=r"line 2 of .*/b\.jsonl is not JSON \(Expecting value"):
        read(folder)


def test_of_several_splits_the_one_named_train_is_read(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "two").to_list() == ROWS
    datasets.DatasetDict(test=rows).save_to_disk(tmp_path / "other")
    with pytest.raises(CompatError, match=r"spec\.finetune\.data: .*of the splits of .* \(test\) none"):
        read(tmp_path / "other")
