"""The reader accepts what users paste, and reports line and column when it cannot."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from zerotrain.contract.config import ConfigError, load, loads

pytestmark = pytest.mark.unit


ACCEPTED = {
    "line comments": '{\n// "a": 2, "quoted"\n"a": 1 // it\'s "fine"\n}',
    "hash comments": '{# "\n"a": 1}# end "',
    "block comments": '/* { " */{"a": /* " */ 1}/**/',
    "trailing commas": '{"a": 1,}',
    "byte order mark": '\ufeff{"a": 1}',
    "no-break spaces": '{\n\u00a0\n\u00a0\u00a0"a":\u00a01\n}',
    "zero-width space": '{"a": 1\u200b}',
    "other spaces": '{\u2003"a"\u3000:\u202f1\u2028}',
    "windows line ends": '{\r\n"a": 1\r\n}\r\n',
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_tolerated(text: str) -> None:
    assert loads(text) == {"a": 1}


def test_comment_marks_and_spaces_inside_texts_stay() -> None:
    assert loads('{"a": "http://x # /* y */\u00a0,}"}') == {"a": "http://x # /* y */\u00a0,}"}


def test_numbers_keep_their_json_type() -> None:
    values = loads('{"a": 5e8, "b": 500_000_000, "c": -1.5, "d": 0, "e": [1, 2.0,],}')
    assert values == {"a": 5e8, "b": 500_000_000, "c": -1.5, "d": 0, "e": [1, 2.0]}
    assert [type(values[name]) for name in "abcd"] == [float, int, float, int]


REFUSED = {
    # name: (text, line:column, part of the message)
    "nothing": ("", "1:1", "Expecting value"),
    "only a comment": ("// x", "1:5", "Expecting value"),
    "open text": ('{"a":\n  "x\n}', "2:3", "closing"),
    "open comment": ('{"a": 1}\n  /* x', "2:3", "Add */"),
    "missing comma": ('{"a": 1\n"b": 2}', "2:1", "delimiter"),
    "missing colon": ('{"a" 1}', "1:6", "delimiter"),
    "comma without value": ('{"a": [,]}', "1:8", "Expecting value"),
    "two commas": ('{"a": 1,,}', "1:9", "property name"),
    "text after the end": ('{"a": 1} {"b": 2}', "1:10", "Extra data"),
    "unquoted key": ("{\n a: 1}", "2:2", 'double quotes: "a"'),
    "single quotes": ("{'a': 1}", "1:2", "plain double quote"),
    "curly quotes": ("{“a”: 1}", "1:2", "plain double quote"),
    "python true": ('{"a": True}', "1:7", "true in lower case"),
    "python none": ('{"a": None}', "1:7", "null instead"),
    "not a number": ('{"a": NaN}', "1:7", "no NaN"),
    "infinity": ('{"a": -Infinity}', "1:7", "no Infinity"),
    "bare fraction": ('{"a": .5}', "1:7", "0.5"),
    "leading zero": ('{"a": 01}', "1:7", "as JSON does"),
    "stray slash": ('{"a": 1 / 2}', "1:9", "must be a number"),
    "bad escape": ('{"a":\n"\\x"}', "2:2", "escape"),
    "raw tab in a text": ('{"a": "\t"}', "1:8", "control character"),
    "repeated key": ('{"a": 1,\n "a": 2}', "2:2", "line 1, column 2 already"),
    "repeated key, escaped": ('{"a": 1, "\\u0061": 2}', "1:10", "line 1, column 2 already"),
    "repeated key, inside": ('{"x": {"a": 1,\n\n  "a": 1}}', "3:3", "line 1, column 8 already"),
}


@pytest.mark.parametrize(("text", "place", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_the_place(text: str, place: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(text, origin="job.json")
    assert caught.value.path == f"job.json:{place}"
    assert message in str(caught.value)


def test_the_same_key_in_two_objects_is_fine() -> None:
    assert loads('{"x": {"a": 1}, "y": [{"a": 1}, {"a": 2}]}')["y"][1] == {"a": 2}


def test_columns_stay_right_after_comments_and_spaces() -> None:
    text = '{ /* one */ "a": 1_000, \u00a0 /* two */ oops }'
    with pytest.raises(ConfigError) as caught:
        loads(text)
    assert caught.value.path == f"text:1:{text.index('oops') + 1}"


@pytest.mark.parametrize("text", ["[1]", '"a"', "3", "null"])
def test_only_objects(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        loads(text)


def test_endless_nesting_and_endless_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="64 deep"):
        loads('{"a":' + "[" * 20_000)
    with pytest.raises(ConfigError, match="numbers that can be read"):
        loads('{"a": ' + "9" * 5000 + "}")


def test_sources(tmp_path: Path) -> None:
    text = '{"a": 1} // x'
    file = tmp_path / "ds.json"
    file.write_bytes("\ufeff".encode() + text.encode())
    assert load(file).values == load(str(file)).values == load(text).values == {"a": 1}
    assert load(file).origin == str(file)
    assert load({"a": (1, 2)}).values == {"a": [1, 2]}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        encoded = encode('{"a": "ÿ?>~"}'.encode()).decode()
        assert load(encoded).values == load(encoded.rstrip("=")).values == {"a": "ÿ?>~"}


def test_a_mapping_is_copied() -> None:
    mine = {"a": {"b": 1}}
    raw = load(mine)
    mine["a"]["b"] = 2
    assert raw.values == {"a": {"b": 1}}


def test_unreadable_sources(tmp_path: Path) -> None:
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\xff\xfe{\x00")
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate((4 << 20) + 1)
    for source, rule in (
        (str(tmp_path / "missing.json"), "must be an existing file"),
        (tmp_path / "missing.json", "No such file"),
        (tmp_path, "Is a directory"),
        (binary, "UTF-8"),
        (big, "at most"),
        ("x\0y", "must be an existing file"),
    ):
        with pytest.raises(ConfigError, match=rule):
            load(source)


def test_mappings_must_hold_json() -> None:
    loop: dict[str, object] = {}
    loop["self"] = loop
    for values in ({"a": {1, 2}}, {"a": float("nan")}, {"a": {1: 2}}, loop):
        with pytest.raises(ConfigError):
            load(values)
