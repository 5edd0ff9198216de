"""`zerotrain checkpoint export` and `zerotrain zero-to-fp32`: a checkpoint's weights as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerotrain.cli.checkpoint import check_folder, volume_failed
from zerotrain.cli.errors import CliError
from zerotrain.cli.output import show
from zerotrain.contract.exit_codes import ExitCode, may_pass

if TYPE_CHECKING:
    from zerotrain.runtime.weights.checkpoint_export import Request

EXAMPLE = (
    "Example: zerotrain checkpoint export runs/my-job/checkpoints out --dtype bf16 --model base-model-folder"
)
FP32_EXAMPLE = "Example: zerotrain zero-to-fp32 checkpoints fp32.safetensors"

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or the folder that holds several.")
]
Tag = Annotated[
    str | None, typer.Option("--tag", "-t", help="Name of the checkpoint; the newest unless given.")
]
ShardSize = Annotated[str, typer.Option(help="Largest file, such as 5GB or 200MB.")]
WithoutFrozen = Annotated[
    bool, typer.Option("--exclude-frozen-parameters", help="Leave out parameters that were not trained.")
]
Model = Annotated[
    Path | None,
    typer.Option(help="Folder of the base model: its config.json and tokenizer are copied to the weights."),
]


def export(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; other files in it stay.")],
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    max_shard_size: ShardSize = "5GB",
    tag: Tag = None,
    model: Model = None,
    exclude_frozen_parameters: WithoutFrozen = False,
) -> None:
    """Write a checkpoint's weights as safetensors that transformers loads. It needs the memory of one
    tile."""
    _run(
        checkpoint,
        output,
        dtype=dtype,
        max_shard_size=max_shard_size,
        tag=tag,
        model=model,
        exclude_frozen=exclude_frozen_parameters,
    )


def zero_to_fp32(
    checkpoint: Checkpoint,
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="Folder to write, or one file that ends in .safetensors.")
    ],
    max_shard_size: ShardSize = "5GB",
    tag: Tag = None,
    model: Model = None,
    exclude_frozen_parameters: WithoutFrozen = False,
) -> None:
    """Write a checkpoint's fp32 weights as safetensors, as DeepSpeed's zero_to_fp32.py does with pickles.
    Tied weights are written under each of their names."""
    _run(
        checkpoint,
        output,
        dtype="fp32",
        every_name=True,
        max_shard_size=max_shard_size,
        tag=tag,
        model=model,
        exclude_frozen=exclude_frozen_parameters,
    )


def _run(
    checkpoint: Path,
    output: Path,
    *,
    dtype: str,
    max_shard_size: str,
    tag: str | None,
    model: Path | None,
    exclude_frozen: bool,
    every_name: bool = False,
) -> None:
    if output.suffix in (".bin", ".pt", ".pth"):
        raise CliError(
            f"{output}: pickled weights are not written, since loading them runs code",
            next_step=f"name a folder, or {output.with_suffix('.safetensors')}",
        )
    try:
        from zerotrain.runtime.checkpoint.errors import CheckpointError
        from zerotrain.runtime.weights.checkpoint_export import Request, export_checkpoint
        from zerotrain.runtime.weights.plan import parse_size
        from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
    except ImportError as error:
        raise CliError(
            f"this command needs the runtime ({error})", next_step="pip install 'zerotrain[runtime]'"
        ) from error
    if dtype not in ("bf16", "fp16", "fp32"):
        raise CliError(f"--dtype must be bf16, fp16 or fp32; got {dtype}", next_step="give one of them")
    check_folder(checkpoint)
    try:
        request = Request(
            checkpoint=checkpoint,
            output=output,
            dtype=TORCH_DTYPES[dtype],
            max_bytes=parse_size(max_shard_size),
            tag=tag,
            exclude_frozen=exclude_frozen,
            every_name=every_name,
            model=_checked_model(model),
        )
        done = export_checkpoint(request)
    except (CheckpointError, OSError, ValueError) as error:
        if isinstance(error, OSError) and may_pass(error.errno):
            raise volume_failed(error, checkpoint) from error
        code = int(getattr(error, "exit_code", ExitCode.BAD_CONFIG))
        is_damaged = code == ExitCode.CHECKPOINT_UNUSABLE
        step = f"zerotrain checkpoint verify {checkpoint}" if is_damaged else "correct what the message names"
        raise CliError(str(error), code=code, next_step=step) from error
    show(
        f"{output}: {done.num_tensors} tensors, {done.num_bytes} bytes in {dtype}, "
        f"step {done.step} of {done.checkpoint}"
    )
    _warn_of_missing_config(request)


def _checked_model(model: Path | None) -> Path | None:
    if model is not None and not (model / "config.json").is_file():
        raise ValueError(f"--model {model} has no config.json; name the folder of the base model")
    return model


def _warn_of_missing_config(request: Request) -> None:
    is_folder = request.output.suffix != ".safetensors"
    if is_folder and request.model is None and not (request.output / "config.json").is_file():
        typer.echo("note: the folder has no config.json; give --model FOLDER to add that of the base model")
