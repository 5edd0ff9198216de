"""`zerotrain plan`: whether a job fits, what it needs of every tier, how fast it can be and what it costs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerotrain.cli.errors import CliError, job_file_errors
from zerotrain.cli.options import ConfigOption, Output, OutputOption
from zerotrain.cli.output import show_record
from zerotrain.contract.exit_codes import ExitCode

if TYPE_CHECKING:
    from zerotrain.client.jobfile import JobFile
    from zerotrain.contract.planner import Accelerator, ModelShape, Rates, Workload

EXAMPLE = "Example: zerotrain plan job.yaml --gpu H100-80GB --rate network=50 --price 24.80"

commands = typer.Typer()


@commands.command("plan", epilog=EXAMPLE)
def plan(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="A ZeroTrainingJob, as for kubectl.")],
    gpu: Annotated[
        str | None,
        typer.Option(help="Model of the GPU, such as H100-80GB, for its memory and its speed by data sheet."),
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="config.json (or its folder) of the model, for a job with model.path.")
    ] = None,
    config: ConfigOption = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of workers to plan for; that of the job unless given.")
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A measured speed: tflops of a rank; GB/s of device, pcie and peer (of a rank), or of "
            "host, nvme and network (of a worker). Repeatable.",
        ),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(help="Measure this machine: its memory, its processor or GPU, the disk of this folder."),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0.0, help="Price of one worker per hour, in any currency.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Plan a job before it runs: whether it fits, its memory and speed, and the nearest setting that fits.

    The memory follows from the formulas by which the engine checks itself; estimates have columns of their
    own. The operator makes the same plan before it creates pods. The exit code is 67 if the job cannot fit.
    """
    from zerotrain.cli.plan_view import Answer, as_json, print_plan
    from zerotrain.operator.api.planning import plan_of

    file = _load(job_file, config)
    device = _device(gpu)
    workload = _workload(file, workers, _shape(file, model_config), device)
    rates = _rates(file, device, workload, probe=probe, given=rate or [])
    answer = Answer(
        name=file.job.name,
        plan=plan_of(workload, file.job.spec, base_workers=_base(file), rates=rates),
        config_from=file.config_place.name if file.config_place is not None else "spec.config",
        rates=rates,
        price_per_worker=price,
    )
    if output is not Output.TABLE:
        show_record(as_json(answer), output)
    else:
        print_plan(answer)
    if answer.is_refused:
        raise typer.Exit(int(ExitCode.DOES_NOT_FIT))


def _load(job_file: Path, config: Path | None) -> JobFile:
    # Imported late: importing the API's models takes a second, which no other command needs to spend.
    from zerotrain.client.config_source import inlined
    from zerotrain.client.jobfile import load_job

    with job_file_errors(job_file):
        file = inlined(load_job(job_file), config)
        file.check()
        return file


def _device(name: str | None) -> Accelerator | None:
    from zerotrain.contract.planner import ACCELERATORS, accelerator

    found = accelerator(name) if name is not None else None
    if name is not None and found is None:
        known = ", ".join(device.name for device in ACCELERATORS)
        raise CliError(
            f"--gpu {name!r} is unknown or ambiguous; known are {known}",
            next_step="for another one give spec.resources.gpus.memory in the job and --rate tflops=...",
        )
    return found


def _shape(file: JobFile, model_config: Path | None) -> ModelShape | None:
    from zerotrain.contract.planner import ShapeError, read_shape

    if model_config is None:
        return None
    model, finetune = file.job.spec.model, file.job.spec.finetune
    factory = model.factory if model is not None else None
    context = factory.context if factory is not None else finetune.max_length if finetune else None
    try:
        return read_shape(model_config, context=context)
    except ShapeError as error:
        raise CliError(str(error), next_step="give another --model-config") from error


def _workload(
    file: JobFile, workers: int | None, shape: ModelShape | None, device: Accelerator | None
) -> Workload:
    from zerotrain.contract.planner import ShapeError
    from zerotrain.operator.api.plan_inputs import workload_of

    try:
        return workload_of(
            file.job.spec, workers=workers, base_workers=_base(file), shape=shape, device=device
        )
    except ShapeError as error:
        raise CliError(
            f"{file.source} cannot be planned: {error}", next_step=_way_out(file, error, workers)
        ) from error


def _way_out(file: JobFile, error: Exception, workers: int | None) -> str:
    from zerotrain.contract.config import ConfigError

    model = file.job.spec.model
    if isinstance(error.__cause__, ConfigError):
        return "give other --workers" if workers is not None else f"correct {file.source}"
    if model is not None and model.path is not None:
        return "give the model's config.json with --model-config, or its size as spec.model.parameters"
    if file.job.spec.finetune is not None:
        return "give the model's config.json with --model-config, or its size as spec.finetune.parameters"
    # The model that a program or a factory builds may have a config.json, too.
    return "give the model's size as spec.model.parameters, or a config.json with --model-config"


def _base(file: JobFile) -> int | None:
    """Return the number of workers whose global batch an elastic job keeps; None for other jobs."""
    spec = file.job.spec
    return spec.workers if spec.elastic is not None else None


def _rates(
    file: JobFile, device: Accelerator | None, workload: Workload, *, probe: Path | None, given: Iterable[str]
) -> Rates:
    """Return the rates of the data sheet. Measured rates replace them, and the user's replace both."""
    from zerotrain.operator.api.plan_inputs import sheet_rates

    rates = sheet_rates(file.job.spec, workload, device)
    if probe is not None:
        from zerotrain.cli.probe import ProbeError, measure

        sharers = workload.ranks_per_worker if workload.on_host else 1
        dtype = workload.config.precision.product_dtype
        try:
            rates = rates.given(measure(probe, ranks=sharers, dtype=dtype), "measured here")
        except ProbeError as error:
            raise CliError(str(error), next_step="name a folder that can be written in") from error
    try:
        return rates.given(dict(_pair(item) for item in given), "given")
    except ValueError as error:
        raise CliError(f"--rate: {error}", next_step=EXAMPLE) from error


def _pair(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise ValueError(f"{text!r} is not NAME=NUMBER") from None


def parse_count(text: str) -> int:
    """Parse a count such as 7B, 7.5e9, 350M or 124439808. Raises ValueError."""
    units = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    cleaned = text.strip().lower().replace("_", "")
    factor = units.get(cleaned[-1:], 1)
    number = float(cleaned[:-1] if factor != 1 else cleaned)
    if not 1 <= number * factor < 10**16:
        raise ValueError(f"{text!r} must be from 1 to 10^16")
    return round(number * factor)
