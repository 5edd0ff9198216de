"""The loop of attempts until the job is done, stopped or out of restarts, by the operator's policy.

The state of the run folder between commands is the number of the last attempt, and a lock.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from zerotrain.cli.errors import CliError
from zerotrain.cli.local.attempt import Attempt, AttemptEnd, free_port
from zerotrain.cli.local.stop import Stop, stop_on_signals
from zerotrain.cli.local.view import View, print_summary, view_for
from zerotrain.client.localrun import LocalRun
from zerotrain.contract.exit_codes import ExitCode, meaning_of
from zerotrain.contract.strict_json import JsonError, read_json
from zerotrain.operator.api import RestartCause
from zerotrain.operator.api.status import Restart
from zerotrain.operator.failure_policy import (
    Decision,
    classify,
    decide,
    matching_rule,
)

STATE_FILE = "run.json"
LOCK_FILE = "lock"
PRIVATE_UMASK = 0o077


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold the run folder for this command. Raises CliError when it is in use or cannot be written.

    Meanwhile a umask keeps the files of the command and its ranks private to the user: other users of the
    machine must not read weights or logs.
    """
    before = os.umask(PRIVATE_UMASK)
    try:
        with _locked(run_dir):
            yield
    finally:
        os.umask(before)


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / LOCK_FILE).open("w")
    except OSError as error:
        raise CliError(
            f"{run_dir}: {error.strerror}",
            code=int(ExitCode.CHECKPOINT_UNUSABLE),
            next_step="give a folder that you may write with --run-dir",
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CliError(
                f"{run_dir} is in use by another `zerotrain run`",
                next_step="wait for it, or give another folder with --run-dir",
            ) from error
        yield


def next_attempt(run_dir: Path, job: str) -> int:
    """Increment and store the attempt number before the attempt starts, so that none is reused.

    The operator does the same. Raises CliError if the folder belongs to another job.
    """
    path = run_dir / STATE_FILE
    last = 0
    if path.exists():
        owner, last = _read_state(path)
        if owner != job:
            raise CliError(
                f"{run_dir} belongs to the job {owner!r}, not {job!r}",
                next_step="give another folder with --run-dir",
            )
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"job": job, "attempt": last + 1}))
    partial.replace(path)
    return last + 1


def _read_state(path: Path) -> tuple[str, int]:
    """Return the job and the last attempt. Raises CliError for a file of another origin or a damaged one."""
    try:
        state = read_json(path)
        return str(state["job"]), int(state["attempt"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = str(error) if isinstance(error, (OSError, JsonError)) else "is no record of a run"
        raise CliError(
            f"{path}: {what}", next_step="give another folder with --run-dir, or remove this one"
        ) from error


@dataclass(kw_only=True, slots=True)
class History:
    """The restarts within this command."""

    restarts: list[Restart] = field(default_factory=list)
    attempts: int = 0

    def by_cause(self) -> dict[str, int]:
        return dict(Counter(str(restart.cause) for restart in self.restarts))


def run_attempts(plan: LocalRun, run_dir: Path, *, max_restarts: int | None = None) -> int:
    """Run the job in `run_dir` and return its exit code. Raises CliError when the folder is not usable."""
    console = Console()
    if max_restarts is not None:
        policy = plan.failure_policy.model_copy(update={"max_restarts": max_restarts})
        plan = replace(plan, failure_policy=policy)
    history = History()
    started = datetime.now(UTC)
    with claimed(run_dir):
        plan.write_files(run_dir)
        with view_for(console, total_steps=plan.total_steps) as view, stop_on_signals() as stop:
            end = _until_over(plan, run_dir, view, stop, history)
    elapsed_s = (datetime.now(UTC) - started).total_seconds()
    print_summary(
        console,
        plan,
        run_dir,
        end,
        attempts=history.attempts,
        restarts=history.by_cause(),
        elapsed_s=elapsed_s,
    )
    return end.code


def _until_over(plan: LocalRun, run_dir: Path, view: View, stop: Stop, history: History) -> AttemptEnd:
    while True:
        end = _one_attempt(plan, run_dir, view, stop)
        history.attempts += 1
        if end.code == ExitCode.DONE or stop.requested.is_set():
            return end
        decision = _decide(end, history, plan)
        if not decision.restart:
            if decision.message:
                view.note(f"no further attempt: {decision.message}")
            return end
        view.note(
            f"attempt {end.attempt} ended with {end.code} at step {end.step} "
            f"({meaning_of(end.code).meaning}); "
            + (f"next in {decision.hold_off_s:g} s" if decision.hold_off_s else "restarting")
        )
        if stop.requested.wait(decision.hold_off_s):
            return end


def _one_attempt(plan: LocalRun, run_dir: Path, view: View, stop: Stop) -> AttemptEnd:
    number = next_attempt(run_dir, plan.name)
    view.note(f"attempt {number}: {plan.num_ranks} ranks in {run_dir}")
    spec = plan.launch_spec(run_dir, attempt=number, master_port=free_port())
    attempt = Attempt(spec, plan.program, environ=plan.environ, on_line=view.line)
    with stop.ending(attempt):
        while not attempt.ended():
            if (report := attempt.report()) is not None:
                view.update(report)
    end = attempt.finish()
    if end.report is not None:
        view.update(end.report)
    return end


def _decide(end: AttemptEnd, history: History, plan: LocalRun) -> Decision:
    """Decide whether another attempt follows, and record the restart if one is granted."""
    now = datetime.now(UTC)
    if end.code == ExitCode.YIELDED:  # another process stopped the ranks: as a preemption in the cluster
        history.restarts.append(
            Restart(time=now, cause=RestartCause.PREEMPTION, reason="Yielded", step=end.step)
        )
        return Decision(restart=True)
    said = end.termination
    failure_class = classify(end.code, exception=said.exception)
    rule = matching_rule(
        plan.failure_policy.rules,
        reason=failure_class.reason,
        exit_code=end.code,
        ranks=frozenset({said.rank} if said.rank is not None else range(plan.num_ranks)),
        texts=tuple(text for text in (said.exception, said.last_line) if text),
    )
    decision = decide(failure_class, history.restarts, plan.failure_policy, step=end.step, now=now, rule=rule)
    if decision.restart:
        history.restarts.append(
            Restart(
                time=now,
                cause=failure_class.cause,
                reason=str(failure_class.reason),
                step=end.step,
                charged=decision.charged,
            )
        )
    return decision
