"""Rows of a fine-tuning: files and folders that are read alike, and errors that name the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerotrain.compat.finetune.rows import load_rows
from zerotrain.compat.refusal import CompatError
from zerotrain.contract.finetune_spec import EvaluationSpec, FinetuneSpec

pytestmark = pytest.mark.ranks

ROWS: list[dict[str, Any]] = [
    {"prompt": f"red {number}", "completion": f"green {number}"} for number in range(6)
]
TURNS = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "green"}]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def read(source: Path, evaluation: EvaluationSpec | None = None) -> Any:
    spec = FinetuneSpec(
        model="/x",
        data=str(source),
        method="full",
        learning_rate=1e-3,
        batch_size=1,
        max_length=8,
        steps=1,
        eval=evaluation,
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


def test_columns_of_other_kinds_are_left_out(tmp_path: Path) -> None:
    row = {"text": "red", "prompt": 1, "labels": [1], "input_ids": [1, 2]}
    assert read(lines(tmp_path / "rows.jsonl", [row, row])).to_list() == [{"text": "red"}] * 2
    with_tools = {"messages": TURNS, "tools": ["f"]}
    assert read(lines(tmp_path / "turns.jsonl", [{**with_tools, "id": 1}])).to_list() == [with_tools]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROWS[0], {"prompt": "red"}], "row 2 of {} has None as completion; give a text or a list"),
        ([ROWS[0], {"prompt": "red", "completion": 7}], "row 2 of {} has 7 as completion; give a text or"),
        ([{"text": "red"}, {"text": TURNS}], "row 2 of {} has "),
        ([{"messages": TURNS}, {"messages": None}], "row 2 of {} has None as messages; give a list of mess"),
        ([{"messages": "red"}], "row 1 of {} has 'red' as messages"),
        ([{"question": "red"}], "the rows of {} have question; they need prompt and completion, or"),
        ([{"messages": TURNS}, {"messages": []}], "row 2 of {} has [] as messages"),
        ([{"messages": [{"content": "red"}]}], "row 1 of {} has [{{'content': 'red'}}] as messages"),
        ([{"messages": [1]}], "row 1 of {} has [1] as messages"),
        ([{"prompt": "red", "completion": ""}] * 2, "every completion of {} is empty; give rows that a"),
    ],
    ids=[
        *("missing", "number", "text-or-list", "null", "type", "columns"),
        *("no-messages", "no-role", "no-message", "empty"),
    ],
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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "{} has no rows; name a file"),
        (b"\n \n", "{} has no rows; name a file"),
        (b'{"text": "red"}\n{"text": "gr\xfcn"}\n', "{} cannot be read: line 2 of {} is no UTF-8"),
        ('{"text": "red"}\n'.encode("utf-16"), "{} cannot be read: line 1 of {} is no UTF-8"),
        (b'{"text": "red", "text": "green"}\n', "{} cannot be read: line 1 of {} "),
        (b'{"text": "\\ud800"}\n{"text": "red"}\n', "{} cannot be read: line 1 of {} 'utf-8' codec can't"),
    ],
    ids=["empty", "blank", "latin-1", "utf-16", "key-twice", "surrogate"],
)
def test_a_file_that_holds_no_texts_is_refused_with_the_line(
    tmp_path: Path, data: bytes, message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(data)
    with pytest.raises(CompatError) as refused:
        read(file)
    assert f"spec.finetune.data: {message.replace('{}', str(file))}" in str(refused.value)


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b""], ids=["bom", "none"])
def test_files_of_other_systems_are_read(tmp_path: Path, mark: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(mark + b"\r\n".join(json.dumps(row).encode() for row in ROWS) + b"\r\n\r\n")
    assert read(file).to_list() == ROWS


def test_copies_in_hidden_folders_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / ".ipynb_checkpoints").mkdir()
    lines(tmp_path / "a.jsonl", ROWS)
    lines(tmp_path / ".ipynb_checkpoints" / "a-checkpoint.jsonl", ROWS)
    assert read(tmp_path).to_list() == ROWS


def test_an_evaluation_leaves_rows_for_the_training(tmp_path: Path) -> None:
    file = lines(tmp_path / "rows.jsonl", ROWS)
    assert len(read(file, EvaluationSpec(every_steps=1, share=0.8))) == 1
    with pytest.raises(
        CompatError, match=r"eval\.share: 0\.9 of the 6 row\(s\) of .* leaves none for training"
    ):
        read(file, EvaluationSpec(every_steps=1, share=0.9))


def test_of_files_of_several_splits_those_of_train_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    folder = tmp_path / "data" / "nested"
    folder.mkdir(parents=True)
    rows = datasets.Dataset.from_list(ROWS)
    rows.select(range(4)).to_parquet(folder / "train-00000-of-00002.parquet")
    rows.select(range(4, 6)).to_parquet(folder / "train-00001-of-00002.parquet")
    rows.select([0]).to_parquet(folder / "test-00000-of-00001.parquet")
    assert read(tmp_path / "data").to_list() == ROWS
    assert "1 of 3 files" in capsys.readouterr().err
    for name in ("train-00000-of-00002", "train-00001-of-00002"):
        (folder / f"{name}.parquet").unlink()
    assert read(folder).to_list() == ROWS[:1], "the folder of one split is named"
    lines(tmp_path / "data" / "dev.jsonl", ROWS)
    (folder / "test-00000-of-00001.parquet").unlink()
    lines(folder / "test.jsonl", ROWS)
    with pytest.raises(CompatError, match=r"of the splits of .*/data \(test, validation\) none"):
        read(tmp_path / "data")


def test_of_several_splits_the_one_named_train_is_read(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "two").to_list() == ROWS
    datasets.DatasetDict(test=rows).save_to_disk(tmp_path / "other")
    with pytest.raises(CompatError, match=r"spec\.finetune\.data: .*of the splits of .* \(test\) none"):
        read(tmp_path / "other")
