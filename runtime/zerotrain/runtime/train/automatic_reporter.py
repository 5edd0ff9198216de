"""Reports of a program that trains with the engine and knows of no launcher.

The first engine that trains opens a reporter for it. From there on the engine's own events tell steps, losses
and tokens, and where training pauses for an evaluation. A program without such an engine reports nothing and
is not judged. `zerotrain.compat` calls `watch_engine` for the scripts that it runs; a program that makes a
`ProgressReporter` takes the reports over.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.checkpoint import SaveResult, claim_job
from zerotrain.runtime.checkpoint.group import ranks_of
from zerotrain.runtime.facade.observer import NO_OBSERVER
from zerotrain.runtime.train.automatic_events import AutomaticEvents, Resume
from zerotrain.runtime.train.engine_events import EngineEvents
from zerotrain.runtime.train.history import event, open_history
from zerotrain.runtime.train.progress_reporter import ProgressReporter
from zerotrain.runtime.train.replay import reached_step

if TYPE_CHECKING:
    from zerotrain.runtime.engine import Engine
    from zerotrain.runtime.step import StepResult
    from zerotrain.runtime.train.report import Reporter


_resumes: list[Resume] = []
"""A choice that no engine has been told of yet."""


class AutomaticReporter(ProgressReporter):
    """Reporter that the program did not make; its steps are those of the engine that it follows."""

    events_class: ClassVar[type[EngineEvents]] = AutomaticEvents

    @staticmethod
    def current() -> AutomaticReporter | None:
        """Return the open one of this process, if any."""
        reporter = ProgressReporter._open
        return reporter if isinstance(reporter, AutomaticReporter) else None

    @property
    def stop_agreed(self) -> bool:
        """Whether all ranks are to stop after the step that ended last."""
        engine = None if self._engine is None else self._engine()
        return engine is not None and engine.stop_agreed

    def follow(self, engine: Engine) -> None:
        """Report this engine's steps, unless another one has made steps and is still open: the engine of a
        reference model is often made first, and not all of them are frozen."""
        followed = None if self._engine is None else self._engine()
        if followed is engine or (followed is not None and _is_training(followed)):
            return
        if followed is not None:
            followed.observer = NO_OBSERVER
        if self._hook is not None:
            self._hook.remove()
        self._engine = None
        self.watch(engine)
        if isinstance(self._events, AutomaticEvents):
            self._events.attach(self.pause, self.finish_stopped)
            while _resumes:
                self._events.resume(_resumes.pop())

    def plan(self, total_steps: int, *, at_step: int = 0) -> None:
        """Report the number of steps of the whole run, once it is known.

        Both are counts of the program's library, which may begin anew with each training of one engine.
        """
        if self._reporter is not None and total_steps > 0:
            engine = None if self._engine is None else self._engine()
            before = 0 if engine is None else max(0, engine.global_steps - at_step)
            self._reporter.set_plan(steps=before + total_steps)

    @contextmanager
    def silent_pause(self) -> Iterator[None]:
        """Mark a save in which the engine's checkpoint is one part, or a load of weights that become the
        result of a training that is over. It is a pause in which the engine's saves and loads are not
        reported: `saved` reports the whole, and the steps that were taken stay."""
        events = self._events
        with self.pause(), events.silent() if isinstance(events, AutomaticEvents) else nullcontext():
            yield

    def saved(self, result: SaveResult) -> None:
        """Report a checkpoint of the program's library, which is durable."""
        if self._reporter is not None and self._events is not None:
            self._events.saved(result, is_latest=True)

    def finish_stopped(self) -> None:
        """End the process with YIELDED: the checkpoint is durable. Collective."""
        engine = None if self._engine is None else self._engine()
        if engine is not None:
            engine.close()
        self.close()
        raise SystemExit(int(ExitCode.YIELDED))

    def withdraw(self) -> None:
        """End these reports: the program makes its own."""
        engine = None if self._engine is None else self._engine()
        if engine is not None:
            engine.observer = NO_OBSERVER
        self._engine = None
        _close_history(self._reporter, "another reporter")
        self._end()

    def _end(self) -> None:
        """End the reports and the history."""
        _close_history(self._reporter, "stopped in order" if self._is_closed else "failed")
        super()._end()

    def stepped(self, result: StepResult, engine: Engine) -> None:
        """Report a step of any engine, if it is the one that is followed; a hook."""
        self.follow(engine)
        if self._engine is None or self._engine() is not engine:
            return
        if self._reporter is None or self._meter is None:
            return
        if not self._meter.boundaries:  # it is followed since now
            self._meter.count(result)
        assert isinstance(self._events, AutomaticEvents)
        if self._reporter.history is None and engine.rank == 0 and not self._reporter.progress.step_at:
            _open_history(self._reporter, engine)
        loss, tokens = self._events.take_step()
        self._meter.add(loss, tokens=tokens * engine.world_size, data_seconds=None)
        self._reporter.step(self._meter.report(engine, result), engine=engine)


def _is_training(engine: Engine) -> bool:
    return engine.last_step is not None and not engine.core.is_closed


def _open_history(reporter: Reporter, engine: Engine) -> None:
    """Begin the history of this attempt, after its resume."""
    launch = reporter.launch
    if launch.checkpoint_dir is not None:
        reporter.reached = reached_step(launch.checkpoint_dir, job_uid=launch.job_uid)
    reporter.history = open_history(
        launch,
        engine,
        total_steps=reporter.progress.total_steps,
        resumed_from=reporter.progress.resumed_from,
        batch=f"{engine.config.batch.train_batch_size} samples",
        say=lambda text: print(text, flush=True),
    )


def _close_history(reporter: Reporter | None, ended: str) -> None:
    if reporter is not None and reporter.history is not None:
        history, reporter.history = reporter.history, None
        history.add(event("ended", step=reporter.progress.step, text=ended))
        history.close()


def resume_from(chosen: Resume) -> None:
    """Report a choice with the next load of the engine, made or to be made."""
    reporter = AutomaticReporter.current()
    if reporter is not None and isinstance(reporter._events, AutomaticEvents):
        reporter._events.resume(chosen)
    else:
        _resumes[:] = [chosen]


def watch_engine(engine: Engine) -> None:
    """Report this engine's training from now on, if the program reports nothing itself. Collective: the job's
    folder becomes this attempt's."""
    if engine.is_evaluation_only:
        return
    claim_job(ranks_of(engine.comm))
    if ProgressReporter._open is None and threading.current_thread() is threading.main_thread():
        AutomaticReporter().stop_on_sigterm()
    if (reporter := AutomaticReporter.current()) is not None:
        reporter.follow(engine)
        engine.register_step_hook(_report_step(weakref.ref(engine)))


def _report_step(watched: weakref.ref[Engine]) -> Callable[[StepResult], None]:
    """Return a step hook for an engine, which does not keep the engine alive."""

    def stepped(result: StepResult) -> None:
        engine, reporter = watched(), AutomaticReporter.current()
        if engine is not None and reporter is not None:
            reporter.stepped(result, engine)

    return stepped


def program_ended(error: BaseException | None) -> None:
    """Report how the program ended, if its training was reported."""
    if (reporter := AutomaticReporter.current()) is not None:
        reporter.__exit__(None if error is None else type(error), error, None)
