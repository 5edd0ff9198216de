"""The table of ranks that `zerotrain top` shows, and a snapshot in one line."""

from __future__ import annotations

from zerotrain.client.formatting import compute_text, since, size, span
from zerotrain.client.snapshot import RankRow, Snapshot
from zerotrain.contract.text import printable

COLUMNS = (
    *("RANK", "PHASE", "STEP", "S/STEP", "WAITS S", "STILL", "DEVICE", "HOST", "SPILL", "POD", "NODE", ""),
)


def cells(row: RankRow) -> tuple[str, ...]:
    """Return a rank as texts, in the order of COLUMNS."""
    return (
        str(row.rank),
        row.phase,
        f"{row.step:,}",
        f"{row.step_seconds:.3f}" if row.step_seconds is not None else "-",
        f"{row.waits_s:.1f}" if row.waits_s is not None else "-",
        span(row.idle_s) if row.idle_s is not None else "-",
        size(row.gpu_bytes) if row.gpu_bytes else "-",
        size(row.host_bytes) if row.host_bytes else "-",
        size(row.spill_bytes) if row.spill_bytes else "-",
        printable(row.pod),
        printable(row.node) or "-",
        str(row.mark),
    )


def loss_and_speed(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the job's loss, tokens per second and arithmetic as texts, empty where it is not known."""
    job = snapshot.job
    return (
        f"loss {job.loss:.4g}" if job.loss is not None else "",
        f"{job.tokens_per_second:,.0f} tokens/s" if job.tokens_per_second else "",
        compute_text(job.step_flops, job.mfu),
    )


def newest_checkpoint(snapshot: Snapshot) -> str:
    """Return step and age of the job's newest checkpoint as a text, empty without one."""
    last = snapshot.job.last_checkpoint
    return f"checkpoint {last.step}, {since(last.time, snapshot.time)} old" if last is not None else ""


def one_line(snapshot: Snapshot) -> str:
    """Return one line for logs and pipes, such as `22:15:04 Running attempt 2 step 140/1000, 0.42 s a step,
    loss 2.314`."""
    job, slowest = snapshot.job, snapshot.slowest
    step = f"{job.step}/{job.total_steps}" if job.total_steps else str(job.step)
    newest = max((row.step for row in snapshot.rows), default=job.step)
    parts = [
        f"{snapshot.time:%H:%M:%S} {job.phase or 'new'} attempt {job.attempt} step "
        + (f"{newest}/{job.total_steps}" if job.total_steps and newest > job.step else step),
        f"{job.step_seconds:.3g} s a step" if job.step_seconds else "",
        *loss_and_speed(snapshot),
        newest_checkpoint(snapshot),
        f"rank {slowest.rank} {slowest.mark} ({slowest.pod})" if slowest and slowest.mark else "",
        snapshot.problem,
    ]
    return ", ".join(part for part in parts if part)
