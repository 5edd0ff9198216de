"""The runner of console blocks: what it reads, what it accepts, and what it rejects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.console import Block, ConsoleError, Shell, blocks, matches

DOCUMENT = """\
Text.

<!-- run: first -->
```console
$ echo one \\
    two
one two
$ printf 'a   b\\nc\\n'
a b
...
```

```console
$ false
```
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text(text)
    return path


def run(tmp_path: Path, text: str) -> Shell:
    shell = Shell(environ={}, folder=tmp_path)
    for block in blocks(written(tmp_path, text)).values():
        shell.run(block)
    return shell


@pytest.mark.ranks
def test_marked_blocks_run_and_others_do_not(tmp_path: Path) -> None:
    shell = run(tmp_path, DOCUMENT)
    assert shell.outputs == ["$ echo one \\\n    two\none two\n", "$ printf 'a   b\\nc\\n'\na   b\nc\n"]


@pytest.mark.ranks
def test_another_output_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConsoleError, match=r"page.md:5: the document has\none three"):
        run(tmp_path, DOCUMENT.replace("\none two\n", "\none three\n"))


@pytest.mark.ranks
def test_a_failing_command_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConsoleError, match="exit 3"):
        run(tmp_path, "<!-- run: a -->\n```console\n$ echo x | (exit 3)\n```\n")


@pytest.mark.unit
def test_a_mark_without_a_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConsoleError, match="1 marks, but 0"):
        blocks(written(tmp_path, "<!-- run: a -->\n\n```console\n$ true\n```\n"))


@pytest.mark.unit
def test_names_are_unique(tmp_path: Path) -> None:
    block = "<!-- run: a -->\n```console\n$ true\n```\n"
    with pytest.raises(ConsoleError, match="two blocks are called a"):
        blocks(written(tmp_path, block * 2))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a ... c", "a b c", True),
        ("a\n...\nc", "a\nb\nb\nc\n", True),
        ("...\nNAME: a", "NAME: a", True),
        ("...\nNAME: a", "a warning\nNAME: a", True),
        ("...\nNAME: a", "RENAME: a", False),
        ("a\n...", "a", True),
        ("a\n...\nc", "a\nc", True),
        ("a\n...\nc", "a\nbc", False),
        ("...", "", True),
        ("NAME  AGE", "NAME      AGE   \n", True),
        ("a", "a\nb", False),
        ("...b", "a", False),
        ("a.c", "abc", False),
    ],
)
def test_ellipsis_is_the_only_wildcard(expected: str, printed: str, same: bool) -> None:
    assert matches(expected, printed) is same


@pytest.mark.ranks
def test_what_is_exported_to_it_reaches_the_command(tmp_path: Path) -> None:
    shell = Shell(environ={"PATH": "/tools", "GREETING": "hello"}, folder=tmp_path)
    text = '<!-- run: a -->\n```console\n$ echo "$GREETING ${PATH%%:*}"\nhello /tools\n```\n'
    (block,) = blocks(written(tmp_path, text)).values()
    assert isinstance(block, Block)
    shell.run(block)
