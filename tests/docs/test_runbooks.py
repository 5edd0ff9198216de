"""The commands and queries of runbooks are understood by the programs that they are typed into.

Whether they work on a job is tested on a node, in `test_quickstart.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.docs.runbooks import KINDS, PLACEHOLDERS, Shown, commands, kinds, queries
from tests.monitoring.rules.rulebook import REPOSITORY, load
from tests.support.checkpoint_states import ThreadRanks, good, layout_for, make_state, on_ranks
from tests.support.devcluster import Devcluster, run
from tests.support.metric_names import exported
from tests.support.promql import ask
from tests.support.tools import run_program
from zerotrain.cli.main import app
from zerotrain.runtime.checkpoint import save

GROUP: Any = typer.main.get_command(app)
DCGM_COUNTERS = REPOSITORY / "charts" / "zerotrain" / "files" / "dcgm" / "counters.csv"
ELSEWHERE = ("dcgmi", "helm")
"""Third-party programs in the text, which nothing here parses."""


def unique(found: Sequence[Shown], *programs: str) -> list[Shown]:
    """Return every command of these programs once."""
    return list({shown.text: shown for shown in found if shown.words()[0] in programs}.values())


@pytest.mark.unit
def test_every_block_has_a_language() -> None:
    assert kinds() == KINDS
    assert len(commands()) > 60
    assert len(queries()) > 60


@pytest.mark.unit
def test_every_command_is_of_a_program_that_is_checked() -> None:
    assert {shown.words()[0] for shown in commands(inline=True)} - set(ELSEWHERE) == {"kubectl", "zerotrain"}


@pytest.mark.unit
def test_readers_fill_in_words_that_are_known() -> None:
    assert set().union(*(shown.placeholders() for shown in commands())) <= PLACEHOLDERS
    assert Shown(runbook="", text="zerotrain logs JOB -n SPACE").placeholders() - PLACEHOLDERS == {"SPACE"}


def problem(words: Sequence[str]) -> str:
    """Return the error of the command line's own parser for `zerotrain WORDS`, without running it."""
    here, context, rest = GROUP, GROUP.context_class(GROUP), list(words)
    try:
        while hasattr(here, "get_command"):
            name, here, rest = here.resolve_command(context, rest)
            context = here.context_class(here, info_name=name, parent=context)
        here.parse_args(context, rest)
    except (Exception, SystemExit) as error:  # whichever copy of click raises its own classes
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return ""


@pytest.mark.unit
@pytest.mark.parametrize("shown", unique(commands(), "zerotrain"), ids=lambda shown: shown.text)
def test_zerotrain_understands_it(shown: Shown) -> None:
    values = {"RANK": "0", "ATTEMPT": "1", "CODE": "137"}
    words = Shown(runbook=shown.runbook, text=shown.filled(values)).words()
    assert problem(words[1:]) == "", shown.runbook


@pytest.mark.unit
@pytest.mark.parametrize(
    "words",
    [["logs", "JOB", "--rnak", "0"], ["describ", "JOB"], ["describe"], ["logs", "JOB", "--tail", "x"]],
)
def test_the_parser_sees_a_mistake(words: list[str]) -> None:
    assert problem(words) != ""


ON_FOLDERS = [shown for shown in unique(commands(), "zerotrain") if "FOLDER" in shown.placeholders()]


@pytest.mark.unit
def test_those_about_checkpoints_are_run() -> None:
    assert {" ".join(shown.words()[1:3]) for shown in ON_FOLDERS} == {"checkpoint ls", "checkpoint verify"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the checkpoints of two ranks at steps 3 and 5."""
    folder, layout = tmp_path_factory.mktemp("checkpoints"), layout_for(2)

    def saved(group: ThreadRanks) -> None:
        for step in (3, 5):
            save(make_state(group.rank, layout), folder, step=step, group=group)

    good(on_ranks(2, saved))
    return folder


@pytest.mark.unit
@pytest.mark.parametrize("shown", ON_FOLDERS, ids=lambda shown: shown.text)
def test_it_works_on_a_folder_of_checkpoints(shown: Shown, checkpoints: Path) -> None:
    done = CliRunner().invoke(app, shown.filled({"FOLDER": str(checkpoints)}).split()[1:])
    assert done.exit_code == 0, done.output
    assert all(f"step-{step:010}-attempt-1" in done.output for step in (3, 5)), done.output


def help_of(words: Sequence[str]) -> list[str]:
    """Return the command with `--help`: kubectl parses every option, then explains instead of acting."""
    end = words.index("--") if "--" in words else len(words)
    return [*words[1:end], "--help"]


def refused(devcluster: Devcluster, words: Sequence[str]) -> str:
    done = run([str(devcluster.program), "kubectl", *help_of(words)])
    # kubectl answers an unknown verb with the list of all verbs.
    explains = done.returncode == 0 and "Usage:" in done.stdout
    return "" if explains and "Basic Commands" not in done.stdout else done.stdout[-300:] + done.stderr


@pytest.mark.cluster
def test_kubectl_understands_every_option(devcluster: Devcluster) -> None:
    shapes = {shape(shown.words()): shown for shown in unique(commands(inline=True), "kubectl")}
    answers = {shown.text: refused(devcluster, shown.words()) for shown in shapes.values()}
    assert {text: words for text, words in answers.items() if words} == {}
    assert len(answers) > 15


def shape(words: Sequence[str]) -> tuple[str, ...]:
    """Return verb and options, which are all that kubectl checks with `--help`, so that each shape is tried
    once.
    """
    text = help_of(words)
    return (text[0], *sorted({word.split("=")[0] for word in text if word.startswith("-")}))


@pytest.mark.cluster
@pytest.mark.parametrize("text", ["kubectl get pods --onlabels=x", "kubectl gte pods"])
def test_kubectl_sees_a_mistake(devcluster: Devcluster, text: str) -> None:
    assert refused(devcluster, text.split()) != ""


def checked(promtool: Path, folder: Path, texts: Sequence[str]) -> str:
    rules = [{"record": f"runbook:{index}", "expr": text} for index, text in enumerate(texts)]
    path = folder / "rules.json"
    path.write_text(json.dumps({"groups": [{"name": "runbooks", "rules": rules}]}))
    return run_program([promtool, "check", "rules", "--lint=none", path])


@pytest.mark.tools
def test_promtool_understands_every_query(promtool: Path, tmp_path: Path) -> None:
    texts = sorted({shown.text for shown in queries()})
    assert f"{len(texts)} rules found" in checked(promtool, tmp_path, texts)


@pytest.mark.tools
@pytest.mark.parametrize("text", ["rate(zerotrain_step)", 'up{namespace="x"', "kubectl get pods"])
def test_promtool_sees_a_mistake(promtool: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError, match="parse"):
        checked(promtool, tmp_path, [text])


@cache
def recorded() -> set[str]:
    """Return the names of the recording rules, and of DCGM's counters."""
    dcgm = re.findall(r"^DCGM_\w+", DCGM_COUNTERS.read_text(), flags=re.MULTILINE)
    return {rule.name for rule in load() if not rule.alerting}.union(dcgm)


def unknown(text: str) -> set[str]:
    """Return the names that no component exports or records, and labels that a series of that name does not
    have.
    """
    names = exported()
    found: set[str] = set()
    for asked in ask(text):
        found |= asked.names - names.keys() - recorded()
        for name in asked.names & names.keys():
            found |= {f"{name}{{{label}}}" for label in asked.labels - names[name]}
    return found


@pytest.mark.unit
def test_every_metric_and_label_of_the_queries_exists() -> None:
    found = {shown.text: wrong for shown in queries() if (wrong := unknown(shown.text))}
    assert found == {}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("sum(rate(zerotrain_tokenz_total[5m]))", "zerotrain_tokenz_total"),
        ('zerotrain_loss{tier="gpu"}', "zerotrain_loss{tier}"),
        ("DCGM_FI_DEV_NO_SUCH", "DCGM_FI_DEV_NO_SUCH"),
    ],
)
def test_an_unknown_name_is_seen(text: str, wrong: str) -> None:
    assert unknown(text) == {wrong}
