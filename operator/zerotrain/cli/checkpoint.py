"""`zerotrain checkpoint ls|verify|diff|import`: inspect the checkpoints of a run. `export` has its own file.

`ls` and `verify` need no torch; `diff` and `import` do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from zerotrain.cli.errors import CliError
from zerotrain.cli.options import Output, OutputOption
from zerotrain.cli.output import show, show_record, show_table
from zerotrain.contract.exit_codes import ExitCode, may_pass

if TYPE_CHECKING:
    from zerotrain.runtime.checkpoint.inspect import Surveyed

LS_EXAMPLE = "Example: zerotrain checkpoint ls runs/gpt/checkpoints/gpt"
VERIFY_EXAMPLE = "Example: zerotrain checkpoint verify runs/gpt/checkpoints/gpt"
DIFF_EXAMPLE = "Example: zerotrain checkpoint diff checkpoints/step-0000000040-attempt-1 other/checkpoints"
IMPORT_EXAMPLE = "Example: zerotrain checkpoint import ds_output checkpoints/gpt"

DIFFERENT = 1
"""Exit code of `diff` when anything differs, the same as that of diff(1)."""

LS_NUMBERS = ("step", "attempt", "ranks", "size", "age")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


FolderArgument = Annotated[Path, typer.Argument(help="The run's checkpoint folder.")]
SideArgument = Annotated[Path, typer.Argument(help="A checkpoint, or a run's folder (then its newest).")]


def ls(folder: FolderArgument, output: OutputOption = Output.TABLE) -> None:
    """List the checkpoints of a folder: step, attempt, ranks, size, age, and whether they are whole.

    The command checks only records and file sizes; `verify` reads every byte.
    """
    with volume_errors(folder):
        rows = _survey(folder)
    if output is not Output.TABLE:
        show_record([_record(row) for row in rows], output)
        return
    numbers = [Column(name, justify="right", overflow="fold") for name in LS_NUMBERS]
    show_table([Column("name", no_wrap=True), *numbers, "state"], map(_row, rows))


def verify_checkpoint(
    folder: Annotated[Path, typer.Argument(help="A run's checkpoint folder, or one checkpoint.")],
    tag: Annotated[str | None, typer.Argument(help="Name of one checkpoint in it; all unless given.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Read every byte of checkpoints and check digests, tensors, and that every parameter is covered.

    Exit codes: 0 if all are whole; 66 if one is damaged or TAG does not exist; 64 if TAG has another format;
    85 if the volume failed, so that nothing is known about the checkpoints.
    """
    with volume_errors(folder):
        missing = _missing(folder / tag) if tag is not None else {}
        found = missing or _verify_all(_checkpoints(folder) if tag is None else [folder / tag])
    if output is not Output.TABLE:
        show_record([{"path": str(path), "problems": found[path]} for path in found], output)
    else:
        bad = "missing" if missing else "damaged"
        for path, problems in found.items():
            show(f"{path.name}: {bad if problems else 'whole'}")
            for problem in problems:
                show(f"  {problem}")
    if any(found.values()):
        raise typer.Exit(int(ExitCode.CHECKPOINT_UNUSABLE))


def diff(first: SideArgument, second: SideArgument, output: OutputOption = Output.TABLE) -> None:
    """Compare two checkpoints tensor by tensor, whatever numbers of ranks wrote them. The exit code is 1 if
    they differ."""
    inspect, compare = _inspect(), runtime_part("zerotrain.runtime.checkpoint.compare")
    check_folder(first)
    check_folder(second)
    sides: list[Any] = []
    try:
        sides.append(compare.Side(inspect.resolve(first)))
        sides.append(compare.Side(inspect.resolve(second)))
        rows = [row for row in compare.differences(*sides) if not row.is_equal]
        steps = [side.manifest.step for side in sides]
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and may_pass(error.errno):
            raise volume_failed(error, first if len(sides) < 1 else second) from error
        raise CliError(
            inspect.reason_of(error),
            code=int(ExitCode.CHECKPOINT_UNUSABLE),
            next_step=f"zerotrain checkpoint verify {first}, and the same of {second}",
        ) from error
    finally:
        for side in sides:
            side.close()
    if output is not Output.TABLE:
        show_record({"steps": steps, "differences": [_difference(row) for row in rows]}, output)
    else:
        if steps[0] != steps[1]:
            typer.echo(f"step {steps[0]} against step {steps[1]}")
        _print_differences(rows)
    if rows:
        raise typer.Exit(DIFFERENT)


def import_checkpoint(
    source: Annotated[
        Path, typer.Argument(help="The folder that DeepSpeed saved to, or the folder of one tag in it.")
    ],
    destination: Annotated[
        Path, typer.Argument(help="The run's checkpoint folder; it is created if it does not exist.")
    ],
    tag: Annotated[
        str | None, typer.Option(help="Name of the result; unless given, it follows from the step.")
    ] = None,
    source_tag: Annotated[
        str | None, typer.Option(help="Tag in the source; unless given, the tag that `latest` names.")
    ] = None,
) -> None:
    """Convert a DeepSpeed checkpoint (ZeRO stages 1 to 3, any number of ranks) to the format of zerotrain.

    A separate process opens the pickled files and accepts only tensors and plain data.
    """
    spawn = runtime_part("zerotrain.runtime.checkpoint.from_deepspeed.spawn")
    from zerotrain.runtime.checkpoint.errors import CheckpointError
    from zerotrain.runtime.checkpoint.from_deepspeed.recognise import deepspeed_path

    path = deepspeed_path(source, source_tag)
    if path is None:
        raise CliError(
            f"{source} holds no DeepSpeed checkpoint (*_model_states.pt)",
            next_step="give the folder that holds `latest`, or one of its tags with --source-tag",
        )
    try:
        imported = spawn.import_checkpoint(path, destination, tag=tag)
    except CheckpointError as error:
        raise CliError(
            str(error),
            code=int(error.exit_code),
            next_step="correct what the message names, or import another tag with --source-tag",
        ) from error
    manifest = _inspect().read_manifest(imported.path)
    for notice in imported.notices:
        show(f"note: {notice}")
    show(f"{path} of step {manifest.step}, written by {manifest.world_size} ranks, is now {imported.path}")


def size_text(num_bytes: int) -> str:
    """Return a size in the binary unit that gives one to four digits before the point."""
    exponent = min(int(math.log2(num_bytes) // 10), len(_UNITS) - 1) if num_bytes else 0
    value = num_bytes / 1024**exponent
    return f"{value:.0f} {_UNITS[exponent]}" if exponent == 0 else f"{value:.1f} {_UNITS[exponent]}"


def age_text(seconds: float) -> str:
    """Return a duration in its largest unit: `3 d`, `5 h`, `12 min`, `40 s`."""
    for name, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def check_folder(folder: Path) -> None:
    """Raise CliError unless `folder` is a folder that can be read."""
    try:
        next(folder.iterdir(), None)
    except OSError as error:
        raise _unreadable(error, folder) from error


@contextmanager
def volume_errors(folder: Path) -> Iterator[None]:
    """Replace an OSError of a failing volume by a CliError; re-raise every other OSError."""
    try:
        yield
    except OSError as error:
        if not may_pass(error.errno):
            raise
        raise volume_failed(error, folder) from error


def volume_failed(error: OSError, folder: Path) -> CliError:
    """Return the CliError for a volume that failed during a read. It says nothing about any checkpoint."""
    name = f"{Path(error.filename).name}: " if isinstance(error.filename, str) else ""
    return CliError(
        f"the volume failed while {folder} was read: {name}{error.strerror}",
        code=int(ExitCode.STORAGE_FAILED),
        next_step="check the volume's server and this machine's mount, then try again",
    )


def _unreadable(error: OSError, folder: Path) -> CliError:
    if may_pass(error.errno):
        return volume_failed(error, folder)
    return CliError(
        f"{folder}: {error.strerror}", next_step="give the folder that the job writes its checkpoints to"
    )


def _missing(path: Path) -> dict[Path, list[str]]:
    """Return the problem of a checkpoint that is absent, by path; empty if the checkpoint exists.

    Raises CliError if its absence is unclear, for example if a checkpoint of another format is in its place.
    A checkpoint that the user names is relied upon, so its absence is reported like damage. Cause and remedy
    are in the last line, because a job's status holds only the last line of the verifying pod.
    """
    try:
        missing: str | None = _inspect().absence(path)
        if missing is None:
            return {}
        if _inspect().may_be_foreign(path):
            raise _foreign(path, missing)
        is_run = path.parent.is_dir()
    except OSError as error:
        raise _unreadable(error, path) from error
    causes = "it was deleted or never committed, or this is another volume or an older copy"
    shown = f"zerotrain checkpoint ls {path.parent} shows what there is"
    return {path: [f"{missing}: {causes}; {shown if is_run else 'give the folder that the job writes to'}"]}


def _foreign(path: Path, missing: str) -> CliError:
    return CliError(
        f"{missing}, nor a rank's tensors: it may be whole, in a format that this command cannot read",
        next_step=f"check {path} with the program that wrote it: it is in another format, or the empty rest "
        f"of one of zerotrain's (zerotrain checkpoint ls {path.parent} shows these)",
    )


def _checkpoints(folder: Path) -> list[Path]:
    """Return `folder` itself, or every committed checkpoint in it. Raises CliError if there is none."""
    if _is_checkpoint(folder):
        return [folder]
    partial = _inspect().Condition.PARTIAL
    if not (found := [row.path for row in _survey(folder) if row.condition is not partial]):
        raise CliError(f"{folder} holds no checkpoint", next_step="give the folder that the job writes to")
    return found


def _survey(folder: Path) -> list[Surveyed]:
    inspect = _inspect()
    check_folder(folder)
    return list(inspect.survey(folder))


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in ("manifest.json", "COMMIT"))


def _verify_all(paths: Sequence[Path]) -> dict[Path, list[str]]:
    inspect = _inspect()
    total = sum(file.stat().st_size for path in paths for file in path.glob("*.safetensors"))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=total)
        return {path: inspect.verify(path, lambda size: progress.advance(task, size)) for path in paths}


def runtime_part(module: str) -> Any:
    """Import a module of the runtime on demand. Raises CliError if it is not installed.

    The help of a command does not need the runtime, and an installation of only the command line or the
    operator does not have it.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        is_own = missing.startswith("zerotrain.runtime")
        if missing not in ("torch", "numpy", "safetensors") and not is_own:
            raise
        raise CliError(
            f"this command needs {'the runtime' if is_own else missing}, which is not installed",
            next_step="pip install 'zerotrain[runtime]'",
        ) from error


def _inspect() -> Any:
    return runtime_part("zerotrain.runtime.checkpoint.inspect")


def _row(row: Surveyed) -> tuple[str, ...]:
    state = f"{row.condition}: {row.reason}" if row.reason else row.condition.value
    return (
        row.path.name,
        _text(row.step),
        _text(row.attempt),
        _text(row.world_size),
        size_text(row.num_bytes),
        age_text(time.time() - row.created_at) if row.created_at is not None else "-",
        f"{state}, latest" if row.is_latest else state,
    )


def _record(row: Surveyed) -> dict[str, Any]:
    return {
        "name": row.path.name,
        "path": str(row.path),
        "condition": row.condition.value,
        "reason": row.reason,
        "step": row.step,
        "attempt": row.attempt,
        "job_uid": row.job_uid,
        "world_size": row.world_size,
        "created_at": row.created_at,
        "num_bytes": row.num_bytes,
        "is_latest": row.is_latest,
    }


def _difference(row: Any) -> dict[str, Any]:
    return {
        "fqn": row.fqn,
        "kind": row.kind,
        "numel": row.numel,
        "differing": row.differing,
        "max_abs": _finite(row.max_abs),
        "note": row.note,
    }


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print_differences(rows: Sequence[Any]) -> None:
    if not rows:
        typer.echo("equal: every parameter, optimizer state and buffer")
        return
    lines = []
    for row in rows:
        numbers = ("", "", "") if row.note else (str(row.differing), str(row.numel), f"{row.max_abs:.6g}")
        lines.append((row.fqn, row.kind, *numbers, row.note))
    show_table(("parameter", "state", "differing", "of", "max abs", "note"), lines)


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)
