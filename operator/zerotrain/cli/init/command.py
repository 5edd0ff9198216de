"""`zerotrain init`: a wizard on a terminal, options anywhere else; both write the same file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from zerotrain.cli.errors import CliError

if TYPE_CHECKING:
    from zerotrain.cli.init.answers import Answers
    from zerotrain.cli.init.propose import Choice
    from zerotrain.contract.planner import ModelShape

EXAMPLE = (
    "Example: zerotrain init --name llama --model /models/llama --model-config ./llama --gpus 8 --gpu H100"
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompter:
    """Source of answers: the value of an option, else a prompt on a terminal, else the default."""

    interactive: bool

    def ask(
        self, option: str, given: object | None, question: str, default: str, read: Callable[[str], T]
    ) -> T:
        """Return the checked answer.

        Raises CliError for a wrong option; a wrong answer is asked for again.
        """
        if given is not None or not self.interactive:
            return self._read(option, default if given is None else str(given), read)
        while True:
            text = str(typer.prompt(question, default=default, show_default=bool(default)))
            try:
                return read(text.strip())
            except ValueError as error:
                typer.echo(f"  {error}")

    def _read(self, option: str, text: str, read: Callable[[str], T]) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise CliError(f"{option}: {error}", next_step="zerotrain init --help") from error


File = Annotated[Path, typer.Argument(metavar="[FILE]", help="The job file to write.")]
Name = Annotated[str | None, typer.Option(help="Name of the job.")]
Image = Annotated[str | None, typer.Option(help="Image of the workers.")]
Model = Annotated[
    str | None,
    typer.Option(
        help="A preset (gpt-125m), gpt:WIDTHxLAYERSxHEADSxCONTEXT, a folder in the image (/models/llama) or "
        "package.module:function."
    ),
]
ModelConfig = Annotated[
    Path | None, typer.Option(help="config.json (or its folder) of a model by path, for the plan.")
]
Parameters = Annotated[
    str | None,
    typer.Option(help="Number of parameters of a model by path or function, such as 7B, for the plan."),
]
DataPath = Annotated[
    str | None, typer.Option(help="Training text in the worker: an absolute path, or builtin:python-stdlib.")
]
Steps = Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Number of workers, which are pods.")]
Gpus = Annotated[int | None, typer.Option(min=0, max=64, help="GPUs of each worker; 0 trains on CPUs.")]
Gpu = Annotated[str | None, typer.Option(help="Model of the GPU, such as H100-80GB, for the plan.")]
Cpu = Annotated[str | None, typer.Option(help="Cores of each worker, such as 32.")]
Memory = Annotated[str | None, typer.Option(help="Host memory of each worker, such as 512Gi.")]
Nvme = Annotated[
    str | None, typer.Option(help="Size of a local volume that states may be spilled to, such as 2Ti.")
]
MicroBatch = Annotated[
    int | None, typer.Option(min=1, help="Samples of a rank in one micro-batch; 8 unless given.")
]
Accumulation = Annotated[int, typer.Option(min=1, help="Micro-batches per step.")]
LearningRate = Annotated[float, typer.Option(min=0.0, help="Learning rate of AdamW.")]
Stage = Annotated[
    int | None, typer.Option(min=0, max=3, help="ZeRO stage; the planner chooses unless given.")
]
Offload = Annotated[
    str | None, typer.Option(help="With --stage: none, cpu or nvme, for the optimizer's states.")
]
Claim = Annotated[str | None, typer.Option(help="PersistentVolumeClaim for checkpoints; empty saves none.")]
EverySteps = Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask no questions; use the defaults.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]

commands = typer.Typer()


@commands.command("init", epilog=EXAMPLE)
def init(
    file: File = Path("job.yaml"),
    name: Name = None,
    image: Image = None,
    model: Model = None,
    model_config: ModelConfig = None,
    parameters: Parameters = None,
    data: DataPath = None,
    steps: Steps = None,
    workers: Workers = None,
    gpus: Gpus = None,
    gpu: Gpu = None,
    cpu: Cpu = None,
    memory: Memory = None,
    nvme: Nvme = None,
    micro_batch: MicroBatch = None,
    accumulation: Accumulation = 1,
    learning_rate: LearningRate = 3e-4,
    stage: Stage = None,
    offload: Offload = None,
    claim: Claim = None,
    every_steps: EverySteps = 500,
    yes: Yes = False,
    force: Force = False,
) -> None:
    """Write a job file with comments, with a ZeRO stage and offload chosen by the memory planner; then plan
    it.

    On a terminal the command asks for the values that no option gives. It replaces a file only with --force.
    """
    from zerotrain.cli.init import answers as check
    from zerotrain.cli.init.answers import Answers

    if file.exists() and not force:
        raise CliError(f"{file} exists", next_step="give another name, or --force to replace it")
    ask = Prompter(interactive=not yes and sys.stdin.isatty() and sys.stdout.isatty()).ask
    chosen = ask("--model", model, "Model (preset, folder or function)", "gpt-125m", check.model)
    if not {"gpt", "preset"} & chosen.keys() and model_config is None:
        chosen |= ask("--parameters", parameters, "Its parameters, as 7B (empty: not known)", "", _parameters)
    num_gpus = ask("--gpus", gpus, "GPUs of each worker (0: CPUs)", "0", check.num_gpus)
    answers = Answers(
        name=ask("--name", name, "Name of the job", _name_of(file), check.name),
        image=ask("--image", image, "Image of the workers", "localhost/zerotrain:dev", _text),
        model=chosen,
        data=ask("--data", data, "Training text in the worker", check.PYTHON_TEXT, check.data),
        steps=ask("--steps", steps, "Optimizer steps", "1000", check.count),
        workers=ask("--workers", workers, "Workers", "1", check.count),
        gpus=num_gpus,
        device=ask("--gpu", gpu, "Which GPU (empty: not known)", "", check.device) if num_gpus else None,
        cpu=cpu,
        memory=ask("--memory", memory, "Host memory of each worker (empty: no limit)", "", str) or None,
        micro_batch=ask("--micro-batch", micro_batch, "Samples of a rank at once", "8", check.count),
        accumulation=accumulation,
        learning_rate=learning_rate,
        claim=ask("--claim", claim, "Claim for checkpoints (empty: save none)", "checkpoints", str) or None,
        every_steps=every_steps,
        nvme=nvme,
    )
    _write(file, answers, _shape(model_config), _asked_for(stage, offload))
    _plan(file, answers, model_config)


def _write(file: Path, answers: Answers, shape: ModelShape | None, given: Choice | None) -> None:
    from pydantic import ValidationError

    from zerotrain.cli.init.propose import as_yaml, propose
    from zerotrain.client.jobfile import JobFileError, parse_job

    try:
        proposal = propose(answers, shape=shape, given=given)
        text = as_yaml(answers, proposal, file=str(file))
        parse_job(text, source=str(file)).check()
    except (JobFileError, ValidationError) as error:
        raise CliError(
            f"the answers make no valid job:\n{error}", next_step="zerotrain init --help"
        ) from error
    try:
        file.write_text(text)
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}", next_step="give a file that can be written") from error
    typer.echo(f"{file}: {proposal.choice.text}. {proposal.reason}\n")


def _plan(file: Path, answers: Answers, model_config: Path | None) -> None:
    """Print the plan of the written file, which is read again as every command reads it."""
    from zerotrain.cli.plan import plan

    try:
        plan(
            file,
            gpu=answers.device.name if answers.device is not None else None,
            model_config=model_config,
        )
    except CliError as error:
        typer.echo(f"not planned: {error}")
        if error.next_step:
            typer.echo(f"next: {error.next_step}")


def _asked_for(stage: int | None, offload: str | None) -> Choice | None:
    from zerotrain.cli.init.propose import Choice

    if offload not in (None, "none", "cpu", "nvme"):
        raise CliError(
            f"--offload must be none, cpu or nvme; got {offload!r}", next_step="zerotrain init --help"
        )
    if stage is None:
        if offload is not None:
            raise CliError("--offload needs --stage", next_step="give --stage too, or let the planner choose")
        return None
    return Choice(stage=stage, optimizer=None if offload == "none" else offload)


def _parameters(text: str) -> dict[str, int]:
    from zerotrain.cli.plan import parse_count

    return {"parameters": parse_count(text)} if text else {}


def _shape(model_config: Path | None) -> ModelShape | None:
    from zerotrain.contract.planner import ShapeError, read_shape

    try:
        return read_shape(model_config) if model_config is not None else None
    except ShapeError as error:
        raise CliError(str(error), next_step="give another --model-config") from error


def _name_of(file: Path) -> str:
    """Turn a file name into a job's name (job.yaml -> job), since a file may have any name."""
    kept = "".join(char if char.isascii() and char.isalnum() else "-" for char in file.stem.lower())
    return kept.strip("-")[:51].strip("-") or "job"


def _text(text: str) -> str:
    if not text or any(char.isspace() for char in text):
        raise ValueError(f"must not be empty or have spaces; got {text!r}")
    return text
