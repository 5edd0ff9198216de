"""The run of one rank, from the environment to the exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.progress import Phase
from zerotrain.runtime.channel import RankChannel
from zerotrain.runtime.train import measuring, rendezvous
from zerotrain.runtime.train.checkpointing import Checkpoints
from zerotrain.runtime.train.engine_events import EngineEvents
from zerotrain.runtime.train.exits import exit_code_of, is_the_users
from zerotrain.runtime.train.history import event, open_history
from zerotrain.runtime.train.loop import TrainingLoop
from zerotrain.runtime.train.replay import reached_step
from zerotrain.runtime.train.report import Reporter
from zerotrain.runtime.train.session import Session, Settings, build, check_inputs
from zerotrain.runtime.train.stopping import StopRequest

if TYPE_CHECKING:
    from zerotrain.runtime.spill.store import SpillInfo


def main(environ: Mapping[str, str] = os.environ) -> None:
    """Train as the environment says and end the process; never returns."""
    channel = RankChannel(None, rank=0)  # until the environment proves readable
    run = Run()
    try:
        channel = RankChannel.from_env(environ)
        code = int(train(environ, channel, run))
    except Exception as error:
        code = report_failure(error, channel, has_stepped=run.has_stepped)
    channel.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: when a peer is gone, the process group's destructors may wait for it for minutes.
    os._exit(code)


@dataclass(slots=True)
class Run:
    """Progress of the run, from which its end is judged."""

    has_stepped: bool = False


def train(environ: Mapping[str, str], channel: RankChannel, run: Run) -> ExitCode:
    """Run the training. Raises the error that ends it early; `exits.exit_code_of` gives its exit code."""
    settings = Settings.read(environ)
    stop = StopRequest(grace_seconds=settings.launch.grace_seconds)
    reporter = Reporter.start(settings.launch, settings.rank, channel)
    reporter.log_every_steps, reporter.policy = settings.spec.log_every_steps, settings.spec.checkpoint
    reporter.set_plan(steps=settings.spec.steps)
    corpus, model = check_inputs(settings)
    reporter.phase(Phase.RENDEZVOUS)
    session = build(settings, corpus, model)
    session.engine.observer = EngineEvents(reporter)
    reporter.phase(Phase.INIT)
    checkpoints = Checkpoints(session=session)
    describe(session, reporter)
    resume(checkpoints, reporter)
    reporter.reached = reached(session)
    loop = TrainingLoop(session=session, checkpoints=checkpoints, reporter=reporter, stop=stop)
    with keeping_history(session, checkpoints, reporter):
        probe_spill(session, reporter)
        try:
            code = loop.run()
        finally:
            run.has_stepped = loop.has_stepped
    stop.finished()
    reporter.done()
    session.engine.close()
    rendezvous.leave()
    return code


@contextlib.contextmanager
def keeping_history(session: Session, checkpoints: Checkpoints, reporter: Reporter) -> Iterator[None]:
    """Write a history of every step within, and at the end how the run ended."""
    settings, engine = session.settings, session.engine
    reporter.history = history = open_history(
        settings.launch,
        engine,
        total_steps=settings.spec.steps,
        resumed_from=checkpoints.resumed_from,
        batch=f"{settings.config.batch.train_batch_size} x {session.model.context} tokens",
        say=reporter.say,
    )
    if history is not None:
        for item in checkpoints.rejected:
            step = checkpoints.resumed_from or 0
            history.add(event("rejected", step=step, text=f"{item.path}: {item.reason}"))
    ended = "stopped in order"
    try:
        yield
    except BaseException as error:
        # The type alone: the message may quote a tenant's training data.
        ended = type(error).__name__
        reporter.failed()
        raise
    finally:
        if history is not None:
            history.add(event("ended", step=session.engine.global_steps, text=ended))
            history.close()


def reached(session: Session) -> int:
    """Return the last step of earlier attempts, as rank 0 reads it beside the checkpoints. Collective."""
    launch, found = session.settings.launch, 0
    if launch.checkpoint_dir is not None and session.settings.rank.rank == 0:
        found = reached_step(launch.checkpoint_dir, job_uid=launch.job_uid)
    return int(session.engine.comm.gather_record([float(found)])[0][0])


def resume(checkpoints: Checkpoints, reporter: Reporter) -> None:
    """Go on from the newest checkpoint, and report it. Collective."""
    began = time.monotonic()
    result = checkpoints.open_and_resume()
    if checkpoints.rejected:
        reporter.rejected(checkpoints.rejected)
    if result is not None:
        reporter.resumed(result, seconds=time.monotonic() - began)
    for notice in checkpoints.notices:
        reporter.say(f"notice: {notice}")


def describe(session: Session, reporter: Reporter) -> None:
    """Log the first lines: the model, the data, the ranks and the settings; and notices about settings with
    another meaning."""
    settings, config = session.settings, session.settings.config
    numel = sum(segment.numel for unit in session.engine.core.layout.units for segment in unit.segments)
    reporter.say(
        f"training {numel / 1e6:.2f} M parameters, ZeRO stage {config.zero.stage}, "
        f"{config.precision.compute_dtype}, {settings.launch.world_size} ranks x {session.threads} threads, "
        f"batch {config.batch.train_batch_size} x {session.model.context} tokens"
    )
    comm = session.engine.comm
    reporter.ready(session.engine)
    reporter.say(f"collectives: {comm.transport} ({comm.transport_reason})")
    if session.engine.spill_info is not None:
        describe_spill(session.engine.spill_info, reporter)
    reporter.say(
        f"data {settings.spec.data_path}: {session.corpus.num_tokens} tokens in {session.loader.num_windows} "
        "samples"
    )
    for text in (*session.corpus.notices, *(f"{item.path}: {item.message}" for item in config.notices)):
        reporter.say(f"notice: {text}")


def describe_spill(info: SpillInfo, reporter: Reporter) -> None:
    """Log how states are spilled."""
    reasons, is_encrypted = info.reasons, info.encryption != "None"
    sealed = f"{info.encryption} by {info.backend}" if is_encrypted else "NOT ENCRYPTED, as asked for"
    reporter.say(
        f"spill: {info.file_bytes / 2**20:.0f} MiB per rank in {', '.join(info.folders)}, {sealed}, "
        f"{info.engine}, {'direct' if info.is_direct else 'buffered'} I/O{f' ({reasons})' if reasons else ''}"
    )
    if is_encrypted:
        reporter.say(f"spill {info.key_memory}; {info.secrecy or 'cores are not refused'}")


def probe_spill(session: Session, reporter: Reporter) -> None:
    """Measure the throughput of the spill's drive, and log it."""
    rate = measuring.probe_spill(reporter.metrics, session.engine)
    if rate is not None:
        reporter.say(f"spill: {rate / 1e6:.0f} MB/s read and written in a pass without arithmetic")


def report_failure(error: Exception, channel: RankChannel, *, has_stepped: bool) -> int:
    """Report to the log and the launcher why this rank ends; return its exit code."""
    if not is_the_users(error, has_stepped=has_stepped):
        traceback.print_exception(error)
    elif error.__cause__ is not None and isinstance(error.__cause__, Exception):
        traceback.print_exception(error.__cause__)
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    channel.failure(error)
    return exit_code_of(error, has_stepped=has_stepped)
