"""Launch environment, train spec, progress and tokens: what one side writes, the other side reads."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotrain.contract import channel_token
from zerotrain.contract.exit_codes import EXIT_CODES, NEVER_RETRIED, ExitCode, RetryClass, meaning_of
from zerotrain.contract.progress import (
    MAX_PATH_CHARS,
    MAX_RANK_ENDS,
    MAX_TERMINATION_BYTES,
    CheckpointProgress,
    Phase,
    Progress,
    RankEnd,
    RejectedCheckpoint,
    Termination,
)
from zerotrain.contract.train_spec import CheckpointPolicy, GptSpec, ModelSpec, TrainSpec, TrainSpecError
from zerotrain.contract.variables import LAUNCH_VARIABLE
from zerotrain.contract.worker_environment import (
    MAX_EXIT_MARGIN_SECONDS,
    CommEnv,
    LaunchError,
    LaunchSpec,
    RankEnv,
    grace_of_ranks,
    unfolded,
)

pytestmark = pytest.mark.unit


KEY = b"k" * 32


def launch(**changes: Any) -> LaunchSpec:
    values: dict[str, Any] = {
        "job": "gpt",
        "job_uid": "uid-1",
        "attempt": 2,
        "master_addr": "gpt-2-0.gpt",
        "world_size": 8,
        "node_rank": 1,
        "ranks_per_worker": 4,
        "config_path": Path("/etc/zt/ds.json"),
    }
    return LaunchSpec(**(values | changes))


def test_environment_round_trips() -> None:
    spec = launch(nvme_path=Path("/nvme"), nvme_bytes=10**12, checkpoint_dir=Path("/ckpt"), grace_seconds=7.5)
    assert LaunchSpec.from_env(spec.to_env()) == spec
    assert list(spec.ranks) == [4, 5, 6, 7]
    assert spec.num_workers == 2


@pytest.mark.parametrize("pod_s", [1, 2, 10, 24, 25, 26, 30, 86_400])
def test_the_launcher_knows_what_of_the_pods_grace_is_its_own(pod_s: int) -> None:
    spec = launch(grace_seconds=grace_of_ranks(pod_s))
    assert 0 < spec.exit_margin_seconds <= MAX_EXIT_MARGIN_SECONDS
    assert spec.grace_seconds + spec.exit_margin_seconds == pytest.approx(pod_s)


def test_a_launcher_gets_one_variable_that_wins_over_others() -> None:
    spec = launch(nvme_path=Path("/nvme"), nvme_bytes=10**12)
    folded = spec.to_variable()
    assert list(folded) == [LAUNCH_VARIABLE]
    given = {**folded, "WORLD_SIZE": "1", "PATH": "/bin"}
    assert LaunchSpec.from_env(given) == spec
    assert unfolded(given) == {**spec.to_env(), "PATH": "/bin"}
    assert unfolded({"PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[]", "JSON object of strings"), ('{"WORLD_SIZE":4}', "JSON object of strings")],
)
def test_an_unreadable_variable_of_the_launcher_is_refused(text: str, words: str) -> None:
    with pytest.raises(LaunchError, match=f"{LAUNCH_VARIABLE}.*{words}"):
        LaunchSpec.from_env({LAUNCH_VARIABLE: text})


def test_every_field_has_its_own_variable() -> None:
    names = [item.metadata["env"] for cls in (LaunchSpec, RankEnv) for item in fields(cls)]
    assert len(names) == len(set(names))


def test_all_missing_variables_are_named_at_once() -> None:
    with pytest.raises(LaunchError) as caught:
        LaunchSpec.from_env({"WORLD_SIZE": "eight"})
    for name in (
        "ZEROTRAIN_JOB",
        "ZEROTRAIN_ATTEMPT",
        "MASTER_ADDR",
        "WORLD_SIZE='eight' is not a whole number",
    ):
        assert name in str(caught.value)


def test_unreadable_rank_is_named() -> None:
    with pytest.raises(LaunchError, match="RANK='one' is not a whole number"):
        RankEnv.from_env({"RANK": "one"})


@pytest.mark.parametrize(
    "name", ["steps", "log_every_steps", "checkpoint.keep_last", "checkpoint.every_steps"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_counts_are_whole_numbers_from_one(name: str, value: object) -> None:
    spec: dict[str, Any] = {"model": {"preset": "x"}, "data_path": "x", "steps": 1, "checkpoint": {}}
    where = spec["checkpoint"] if name.startswith("checkpoint.") else spec
    where[name.removeprefix("checkpoint.")] = value
    with pytest.raises(TrainSpecError, match=f"^{name} must be .*; got {value!r}$"):
        TrainSpec.from_json(json.dumps(spec))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attempt": 0}, "attempt must be at least 1; got 0"),
        ({"world_size": 0}, "world_size must be at least 1; got 0"),
        ({"node_rank": 2}, "node_rank must be between 0 and 1; got 2"),
        ({"ranks_per_worker": 3}, "WORLD_SIZE=8 is not a multiple of ZEROTRAIN_RANKS_PER_WORKER=3"),
        ({"ranks_per_worker": 9}, "ranks_per_worker must be between 1 and 8; got 9"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(**changes)
    assert message in str(caught.value)


def test_train_spec_round_trips() -> None:
    model = ModelSpec(gpt=GptSpec(d_model=64, layers=2, heads=4, context=32))
    spec = TrainSpec(
        model=model, data_path="/data", steps=5, checkpoint=CheckpointPolicy(every_steps=2, keep_last=1)
    )
    assert TrainSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "train.json is not JSON"),
        ("[]", "train.json must be an object; got list"),
        ('{"model": {"preset": "x"}, "steps": 1}', "data_path is missing"),
        (
            '{"model": {}, "data_path": "x", "steps": 1}',
            "exactly one of gpt, preset, factory, path; got none",
        ),
        ('{"model": {"preset": "x", "path": "y"}, "data_path": "x", "steps": 1}', "got ['preset', 'path']"),
        ('{"model": {"preset": "x"}, "data_path": "x", "steps": 0}', "steps must be at least 1; got 0"),
        ('{"model": {"preset": "x"}, "data_path": "x", "steps": 1, "stepz": 1}', "stepz is not a key here"),
        ('{"model": {"gpt": {"d_model": 64}}, "data_path": "x", "steps": 1}', "model.gpt.context is missing"),
        (
            '{"model": {"gpt": {"d_model": 65, "layers": 1, "heads": 4, "context": 8}},'
            ' "data_path": "x", "steps": 1}',
            "model.gpt.d_model 65 is not a multiple of heads 4; take 64",
        ),
    ],
)
def test_wrong_train_specs_are_refused(text: str, message: str) -> None:
    with pytest.raises(TrainSpecError) as caught:
        TrainSpec.from_json(text)
    assert message in str(caught.value)


def test_progress_round_trips_and_ignores_unknown_keys() -> None:
    saved = CheckpointProgress(step=20, path="/ckpt/step-20", time=5.0)
    rejected = (RejectedCheckpoint(path="/ckpt/step-40", reason="digest"),)
    progress = Progress(
        rank=1, attempt=2, phase=Phase.STEP, step=21, checkpoint=saved, rejected_checkpoints=rejected
    )
    data = json.loads(progress.to_json()) | {"of_a_newer_version": 1}
    assert Progress.from_json(json.dumps(data)) == progress
    with pytest.raises(ValueError, match="attempt"):
        Progress.from_json('{"rank": 0}')


@settings(max_examples=25)  # texts of this length take milliseconds each to draw
@given(exception=st.text(max_size=20000), last_line=st.text(max_size=20000))
def test_termination_messages_fit_what_kubelet_keeps(exception: str, last_line: str) -> None:
    saved = CheckpointProgress(step=20, path="/ckpt/" + "x" * 200, time=5.0)
    message = Termination(
        attempt=3, code=1, rank=7, exception=exception, last_line=last_line, checkpoint=saved
    )
    text = message.to_json()
    assert len(text.encode()) <= MAX_TERMINATION_BYTES
    read = Termination.from_json(text)
    assert (read.attempt, read.code, read.rank) == (3, 1, 7)


@given(
    exception=st.text(max_size=5000),
    reason=st.text(max_size=500),
    ranks=st.integers(0, 600),
    path=st.text(max_size=MAX_PATH_CHARS),
)
def test_all_ranks_of_a_worker_fit_with_their_codes(
    exception: str, reason: str, ranks: int, path: str
) -> None:
    """Texts are dropped before exit codes, whatever the alphabet; beyond 64 ranks, the later ranks are
    dropped.
    """
    failed = tuple(RankEnd(rank=639_000 + rank, code=139, reason=reason) for rank in range(ranks))
    saved = CheckpointProgress(step=20, path=path, time=5.0)
    message = Termination(
        attempt=999_999, code=1, rank=7, exception=exception, also_failed=failed, checkpoint=saved
    )
    text = message.to_json()
    assert len(text.encode()) <= MAX_TERMINATION_BYTES
    read = Termination.from_json(text)
    assert [(item.rank, item.code) for item in read.also_failed] == [
        (item.rank, item.code) for item in failed[:MAX_RANK_ENDS]
    ]
    assert (read.code, read.rank) == (1, 7)


def test_a_failure_of_eight_ranks_fits_with_the_last_lines_of_five_containers() -> None:
    failed = tuple(RankEnd(rank=rank, code=1, reason="DistError:" + " lost" * 6) for rank in range(1, 8))
    saved = CheckpointProgress(step=120_000, path="/checkpoints/llama-70b/step-120000", time=1.7e9)
    message = Termination(
        attempt=3,
        code=1,
        rank=0,
        step=120_047,
        exception="RuntimeError: " + "E" * 400,
        last_line="L" * 400,
        checkpoint=saved,
        also_failed=failed,
    )
    assert Termination.from_json(message.to_json()) == message
    long = replace(message, exception="E" * 9000, also_failed=(replace(failed[0], reason="R" * 9000),) * 7)
    assert len(long.to_json()) <= 12 * 1024 // 6
    read = Termination.from_json(long.to_json())
    assert (read.step, read.checkpoint, len(read.also_failed)) == (120_047, saved, 7)


MESSAGE = Termination(
    attempt=3,
    code=134,
    rank=7,
    signal=6,
    step=120_047,
    checkpoint=CheckpointProgress(step=120_000, path="/ckpt/step-120000", time=1.7e9),
    exception='Error: "a", {"b": [1]}, \\ \N{FIRE}' * 9,
    last_line='},{ ,"also_failed": \\' * 9,
    also_failed=tuple(RankEnd(rank=rank, code=139, reason='"},{,"') for rank in range(8)),
)
"""Termination message whose texts contain the delimiters of its fields."""


def test_a_message_cut_by_kubelet_keeps_what_is_complete() -> None:
    text = MESSAGE.to_json()
    facts = text.index(',"exception"')
    assert facts < 256, "what decides stands first"
    for end in range(facts + 1, len(text)):
        read = Termination.from_json(text[:end])
        texts: dict[str, Any] = {
            "exception": MESSAGE.exception,
            "last_line": MESSAGE.last_line,
            "also_failed": MESSAGE.also_failed,
        }
        assert replace(read, **texts) == MESSAGE
        assert MESSAGE.also_failed[: len(read.also_failed)] == read.also_failed
        for part, of in ((read.exception, MESSAGE.exception), (read.last_line, MESSAGE.last_line)):
            # A partial character at the cut is dropped.
            assert part is None or (of or "").startswith(part.rstrip("?"))
    parsed = Termination.from_json(text[: text.index(',"also_failed"', facts) + 300])
    assert (parsed.exception, parsed.last_line) == (MESSAGE.exception, MESSAGE.last_line)
    assert len(parsed.also_failed) > 1


def test_of_an_older_launchers_the_beginning_too_and_no_number_without_its_end() -> None:
    """Older launchers wrote the texts before step and checkpoint."""
    parts = json.loads(MESSAGE.to_json())
    late = {name: parts.pop(name) for name in ("step", "checkpoint", "also_failed")}
    text = json.dumps(parts | late, separators=(",", ":"))
    assert Termination.from_json(text) == MESSAGE
    for end in range(text.index(',"exception"') + 1, len(text)):
        read = Termination.from_json(text[:end])
        assert (read.attempt, read.code, read.rank, read.signal) == (3, 134, 7, 6)
        assert read.step in (0, MESSAGE.step)
        assert read.checkpoint in (None, MESSAGE.checkpoint)


@pytest.mark.parametrize(
    "text", ["", "{", '{"attempt":1', '{"attempt":1,"code":13', '{"attempt":', '{"a":1,"b']
)
def test_too_short_a_beginning_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"code|Expecting|Unterminated"):
        Termination.from_json(text)


def test_few_ranks_keep_their_reasons() -> None:
    failed = tuple(RankEnd(rank=rank, code=1, reason=f"RuntimeError: {rank}") for rank in range(8))
    message = Termination(attempt=1, code=1, rank=9, exception="E" * 300, also_failed=failed)
    assert Termination.from_json(message.to_json()) == message


@pytest.mark.parametrize(
    "also_failed", [{}, "x", 3, [3], [{}], [{"rank": "0", "code": 1}], [{"rank": True, "code": 1}]]
)
def test_ranks_that_are_none_are_refused(also_failed: object) -> None:
    with pytest.raises(ValueError, match=r"also_failed|RankEnd"):
        Termination.from_json(json.dumps({"attempt": 1, "code": 1, "also_failed": also_failed}))


def test_of_ranks_that_a_program_makes_up_few_are_read() -> None:
    made_up = [{"rank": rank, "code": 1, "reason": "x" * 300} for rank in range(10_000)]
    read = Termination.from_json(json.dumps({"attempt": 1, "code": 1, "also_failed": made_up}))
    assert len(read.also_failed) == MAX_RANK_ENDS
    assert all(len(item.reason) < 300 for item in read.also_failed)


def test_tokens_differ_by_job_attempt_and_key() -> None:
    token = channel_token.derive(KEY, "uid-1", 1)
    others = [
        channel_token.derive(KEY, "uid-1", 2),
        channel_token.derive(KEY, "uid-2", 1),
        channel_token.derive(b"j" * 32, "uid-1", 1),
    ]
    assert channel_token.matches(token, channel_token.derive(KEY, "uid-1", 1))
    assert not any(channel_token.matches(token, other) for other in others)
    with pytest.raises(ValueError, match="at least 32 bytes; got 3"):
        channel_token.derive(b"abc", "uid-1", 1)


def test_every_exit_code_has_one_row() -> None:
    assert sorted(row.code for row in EXIT_CODES) == sorted(int(code) for code in ExitCode)
    assert set(range(64, 70)) <= NEVER_RETRIED
    assert meaning_of(1).retry is RetryClass.APPLICATION
    assert meaning_of(139).meaning == "killed by signal 11"


def test_how_collectives_behave_is_read_from_the_environment() -> None:
    assert CommEnv.from_env({}) == CommEnv(transport="auto", watchdog_seconds=600.0, delay_seconds=0.0)
    given = {"ZEROTRAIN_TRANSPORT": "gloo", "ZEROTRAIN_WATCHDOG_SECONDS": "5", "LOCAL_WORLD_SIZE": "4"}
    assert CommEnv.from_env(given) == CommEnv(transport="gloo", watchdog_seconds=5.0, local_world_size=4)
    for name, text in (
        ("ZEROTRAIN_TRANSPORT", "carrier pigeon"),
        ("ZEROTRAIN_WATCHDOG_SECONDS", "soon"),
        ("ZEROTRAIN_WATCHDOG_SECONDS", "-1"),
        ("ZEROTRAIN_COLLECTIVE_DELAY_SECONDS", "-0.5"),
        ("ZEROTRAIN_HANG_BACKSTOP_SECONDS", "0"),
        ("ZEROTRAIN_HANG_BACKSTOP_SECONDS", "nan"),
        ("ZEROTRAIN_HANG_BACKSTOP_SECONDS", "inf"),
    ):
        with pytest.raises(LaunchError, match=name):
            CommEnv.from_env({name: text})


def test_who_looks_after_hangs_sets_how_long_ranks_wait() -> None:
    spec = launch(hang_backstop_seconds=5e6)
    assert LaunchSpec.from_env(spec.to_env()) == spec
    found = CommEnv.from_env(spec.to_env())
    assert (found.watchdog_seconds, found.hang_backstop_seconds) == (5e6, 5e6)
    found = CommEnv.from_env(spec.to_env() | {"ZEROTRAIN_WATCHDOG_SECONDS": "7"})
    assert (found.watchdog_seconds, found.hang_backstop_seconds) == (7.0, 5e6)
    for wrong in (0.0, -1.0, float("nan"), float("inf"), 1e12):
        with pytest.raises(LaunchError, match="ZEROTRAIN_HANG_BACKSTOP_SECONDS must be above 0"):
            launch(hang_backstop_seconds=wrong)
