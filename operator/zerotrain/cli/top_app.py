"""The live view of `zerotrain top`.

It shows snapshots that a thread takes, so that keys never wait for a cluster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, ProgressBar, Sparkline, Static

from zerotrain.cli.top_table import COLUMNS, cells, loss_and_speed, newest_checkpoint
from zerotrain.client.errors import ClientError, JobNotFoundError
from zerotrain.client.formatting import counted, size, span
from zerotrain.client.snapshot import Mark, RankRow, Snapshot, TierRow
from zerotrain.contract.text import printable

HISTORY = 120
"""Number of step times that the sparkline shows."""

_COLOURS = {
    Mark.FINE: "",
    Mark.SLOW: "yellow",
    Mark.STILL: "red",
    Mark.SILENT: "red",
    Mark.ACCUSED: "bold red",
}
_PHASES = {"Running": "bold green", "Completed": "bold green", "Failed": "bold red", "Stalled": "bold red"}
_BAR_WIDTH = 24


class TopApp(App[str]):
    """The terminal application. It ends with a message for the terminal, or None."""

    CSS = """
    #head { height: auto; padding: 0 1; }
    #bar { width: 100%; height: 1; padding: 0 1; }
    #bar Bar { width: 1fr; }
    #middle { height: 7; }
    #pace { width: 1fr; border: round $primary; padding: 0 1; }
    #memory { width: 1fr; height: 100%; border: round $primary; padding: 0 1; }
    #spark { height: 1fr; }
    #ranks { height: 1fr; }
    #problem { height: auto; max-height: 4; color: $warning; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort"),
        Binding("p", "pause", "Pause"),
        Binding("r", "look", "Look now"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, take: Callable[[], Snapshot], *, first: Snapshot, every_s: float) -> None:
        super().__init__()
        self._take, self._every_s = take, every_s
        self.snapshot = first
        self.by_slowest = False
        self.paused = False
        self._paces: deque[float] = deque(maxlen=HISTORY)

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield ProgressBar(id="bar", show_eta=False)
        with Horizontal(id="middle"):
            with Vertical(id="pace"):
                yield Static(id="paces", markup=False)
                yield Sparkline([], id="spark", summary_function=max)
            yield Static(id="memory", markup=False)
        yield DataTable(id="ranks", cursor_type="row", zebra_stripes=True)
        yield Static(id="problem", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#pace").border_title = "seconds a step"
        self.query_one("#memory").border_title = "memory of a rank, of the plan"
        self.query_one(DataTable).add_columns(*COLUMNS)
        self.show(self.snapshot)
        self.set_interval(self._every_s, self.action_look)

    def action_sort(self) -> None:
        self.by_slowest = not self.by_slowest
        self.show(self.snapshot)

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.show(self.snapshot)

    def action_look(self) -> None:
        """Take the next snapshot in a thread, unless the view is paused."""
        if not self.paused:
            self._look()

    @work(thread=True, exclusive=True, group="look")
    def _look(self) -> None:
        try:
            snapshot = self._take()
        except JobNotFoundError as error:
            self.call_from_thread(self.exit, str(error))
        except ClientError as error:
            self.call_from_thread(self._show_problem, f"{error}")
        else:
            self.call_from_thread(self.show, snapshot)

    def _show_problem(self, problem: str) -> None:
        """Show a problem.

        The last snapshot stays on the screen, since the cluster may be back at the next one.
        """
        self.query_one("#problem", Static).update(Text(printable(" ".join(problem.split()))))

    def show(self, snapshot: Snapshot) -> None:
        """Put a snapshot on the screen."""
        self.snapshot = snapshot
        job = snapshot.job
        self.query_one("#head", Static).update(_head(snapshot, paused=self.paused))
        step = max((row.step for row in snapshot.rows), default=job.step)
        self.query_one(ProgressBar).update(total=job.total_steps, progress=step)
        self._show_pace(snapshot)
        memory = [_tier(row) for row in snapshot.tiers] or [Text("no plan, and no rank that reports")]
        self.query_one("#memory", Static).update(Text("\n").join(memory))
        self._show_ranks(snapshot)
        self._show_problem(snapshot.problem)

    def _show_pace(self, snapshot: Snapshot) -> None:
        paces = [row.step_seconds for row in snapshot.rows if row.step_seconds]
        if paces and not self.paused:
            self._paces.append(max(paces))
        text = "no step yet"
        if paces:
            text = f"slowest rank {max(paces):.3f}, fastest {min(paces):.3f}"
            if self._paces:
                text += f"; {min(self._paces):.3f} to {max(self._paces):.3f} so far"
        self.query_one("#paces", Static).update(Text(text))
        self.query_one(Sparkline).data = list(self._paces)

    def _show_ranks(self, snapshot: Snapshot) -> None:
        table = self.query_one(DataTable)
        row = table.cursor_row
        table.clear()
        for rank in self._ordered(snapshot.rows):
            table.add_row(*(Text(text, style=_COLOURS[rank.mark]) for text in cells(rank)))
        if table.row_count:
            table.move_cursor(row=min(row, table.row_count - 1))

    def _ordered(self, rows: tuple[RankRow, ...]) -> list[RankRow]:
        if not self.by_slowest:
            return list(rows)
        return sorted(rows, key=lambda row: (row.mark is Mark.FINE, row.step, -(row.step_seconds or 0.0)))


def _head(snapshot: Snapshot, *, paused: bool) -> Text:
    job = snapshot.job
    text = Text()
    text.append(printable(job.reference), style="bold")
    text.append(f"  {job.phase or 'new'}", style=_PHASES.get(job.phase, "bold yellow"))
    facts = [
        f"attempt {job.attempt}",
        f"{job.ranks.ready}/{job.ranks.desired} ranks",
        *loss_and_speed(snapshot),
        newest_checkpoint(snapshot) or "no checkpoint",
        counted(job.restarts.total, "restart") if job.restarts.total else "",
        f"{_left(snapshot)} to go" if _left(snapshot) else "",
        f"{snapshot.time.astimezone():%H:%M:%S}",
    ]
    text.append("  " + " · ".join(fact for fact in facts if fact), style="")
    if paused:
        text.append("  PAUSED", style="reverse")
    return text


def _left(snapshot: Snapshot) -> str:
    job = snapshot.job
    if job.phase != "Running" or not job.total_steps or not job.step_seconds or job.step >= job.total_steps:
        return ""
    return span((job.total_steps - job.step) * job.step_seconds)


def _tier(row: TierRow) -> Text:
    """Return one line such as `host  ██████░░░░  61 %  1.2 GiB of 2 GiB`."""
    share = row.share
    if share is None:
        amount = f"of {size(row.planned)}" if row.planned else "(not planned)"
        return Text(f"{row.tier:<5} {size(row.taken)} {amount}")
    filled = round(min(share, 1.0) * _BAR_WIDTH)
    style = "red" if share > 1 else "yellow" if share > 0.9 else "green"
    text = Text(f"{row.tier:<5}")
    text.append("█" * filled, style=style)
    text.append("░" * (_BAR_WIDTH - filled), style="dim")
    text.append(f" {100 * share:3.0f} %  {size(row.taken)} of {size(row.planned or 0)}")
    return text
