"""Training of a fine-tuning by TRL's SFTTrainer."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from zerotrain.compat.finetune.hub import check_name
from zerotrain.compat.finetune.rows import check_rows, load_rows, losses_of
from zerotrain.compat.refusal import CompatError
from zerotrain.contract.finetune_spec import FinetuneSpec
from zerotrain.contract.strict_json import read_json

FINAL = "final"
"""Folder below the output folder with the result: the model, or the adapter."""

SAVE_EVERY_STEPS = 500
WHOLE_RESULT = "stage3_gather_16bit_weights_on_model_save"
ALL_LINEAR = "all-linear"
"""PEFT's name of every linear layer but the head."""


def train(spec: FinetuneSpec, config: Path) -> Any:
    """Train as `spec` says, with the DeepSpeed-style configuration at `config`, and save the result.

    Returns the SFTTrainer. Raises CompatError that names the field.
    """
    # What is missing is said before the libraries are imported, which takes seconds.
    _check_model(spec)
    check_rows(spec)
    trainer = _trainer(spec, config)
    trainer.train()
    trainer.save_model(str(Path(spec.output) / FINAL))
    return trainer


def _trainer(spec: FinetuneSpec, config: Path) -> Any:
    """Return the SFTTrainer. Raises CompatError that names the field."""
    transformers, trl = (_library(name) for name in ("transformers", "trl"))
    transformers.set_seed(spec.seed)
    # Before the model: the arguments tell transformers of stage 3, under which each rank reads its own share.
    arguments = trl.SFTConfig(**options(spec, config))
    _check_config(arguments)
    with arguments.main_process_first(local=True, desc="read the rows"):
        rows, evaluated = load_rows(spec)
    for name, value in losses_of(spec, rows.column_names).items():
        setattr(arguments, name, value)
    model, tokenizer = _model(transformers, spec)
    if tokenizer.chat_template is None and trl.is_conversational(rows[0]):
        raise CompatError(
            f"spec.finetune.chatTemplate: the rows of {spec.data} are messages, and {spec.model} has no chat "
            "template; give one as chatTemplate, or rows with prompt and completion as text"
        )
    adapter = _adapter(spec, model)
    try:
        trainer = trl.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            eval_dataset=evaluated,
            processing_class=tokenizer,
            peft_config=adapter,
            callbacks=_callbacks(transformers, spec),
        )
    except (ValueError, TypeError, _library("jinja2").TemplateError) as error:
        raise CompatError(
            f"spec.finetune: TRL cannot train on {spec.data} with these settings: {error}; change the rows, "
            "chatTemplate, completionOnly or packing"
        ) from error
    _check_kept(spec, "data", rows, trainer.train_dataset)
    if evaluated is not None:
        _check_kept(spec, "eval", evaluated, trainer.eval_dataset)
    return trainer


def _check_config(arguments: Any) -> None:
    """Raise CompatError if the configuration has another value where the fine-tuning has one."""
    found = [text.strip(" -") for text in arguments.hf_deepspeed_config.mismatches]
    if found:
        raise CompatError(
            f"spec.config: {'; '.join(found)}: spec.finetune says the latter; give auto in the "
            "configuration, or the same value"
        )


def _check_kept(spec: FinetuneSpec, field: str, rows: Any, kept: Any) -> None:
    """Say how many rows TRL left out because all that counts in the loss was cut off. Raises CompatError if
    it kept none."""
    if not len(kept):
        raise CompatError(
            f"spec.finetune.maxLength: none of the {len(rows)} rows of {field} has a token that counts in "
            f"the loss within its first {spec.max_length}; raise maxLength, or set completionOnly to false"
        )
    # Packed rows are fewer for another reason.
    if len(kept) < len(rows) and not spec.packing and os.environ.get("RANK", "0") == "0":
        print(
            f"zerotrain.compat: spec.finetune.maxLength: {len(rows) - len(kept)} of {len(rows)} rows of "
            f"{field} are left out: none of their first {spec.max_length} tokens counts in the loss",
            file=sys.stderr,
        )


def options(spec: FinetuneSpec, config: Path) -> dict[str, Any]:
    """Return the options of SFTConfig, except those that depend on the rows."""
    blocks = _with_zero(read_json(config, follow_link=True))  # files of a mounted ConfigMap are links
    saves = spec.save_every_steps or (spec.eval.every_steps if spec.eval else SAVE_EVERY_STEPS)
    found = {
        "output_dir": spec.output,
        "deepspeed": blocks,
        "bf16": _is_enabled(blocks, "bf16"),
        "fp16": _is_enabled(blocks, "fp16"),
        "use_cpu": not _library("torch").cuda.is_available(),
        "gradient_checkpointing": False,
        **_of_config(blocks),
        "per_device_train_batch_size": spec.batch_size,
        "per_device_eval_batch_size": spec.batch_size,
        "gradient_accumulation_steps": spec.accumulation_steps,
        "learning_rate": spec.learning_rate,
        "max_length": spec.max_length,
        "packing": spec.packing,
        "seed": spec.seed,
        "logging_steps": spec.log_every_steps,
        "save_steps": saves,
        "save_total_limit": spec.keep_last,
        "restore_callback_states_from_checkpoint": spec.early_stopping is not None,
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": spec.steps or -1,
        "num_train_epochs": spec.epochs or 1,
    }
    if spec.eval is not None:
        found |= {
            "eval_strategy": "steps",
            "eval_steps": spec.eval.every_steps,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": False,
        }
    return found


def _with_zero(blocks: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with a block for ZeRO, without which Accelerate refuses it. In it the Trainer
    saves whole weights at stage 3, unless it says otherwise: the result is of no use without them."""
    zero = blocks.setdefault("zero_optimization", {"stage": 0})
    if isinstance(zero, dict) and not any("gather" in key and "on_model_save" in key for key in zero):
        blocks["zero_optimization"] = {**zero, WHOLE_RESULT: True}
    return blocks


def _of_config(blocks: dict[str, Any]) -> dict[str, Any]:
    """Return the options for which the Trainer takes the configuration's value only if both are the same."""
    optimizer = blocks.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    given = {**(params if isinstance(params, dict) else {}), "clipping": blocks.get("gradient_clipping")}
    names = {"clipping": "max_grad_norm", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
    found = {names[key]: given[key] for key in names if isinstance(given.get(key), int | float)}
    if isinstance(betas := given.get("betas"), list) and len(betas) == 2:
        found |= dict(zip(("adam_beta1", "adam_beta2"), betas, strict=True))
    return found


def _is_enabled(blocks: Any, name: str) -> bool:
    block = blocks.get(name) if isinstance(blocks, dict) else None
    return isinstance(block, dict) and block.get("enabled") is True


def _check_model(spec: FinetuneSpec) -> None:
    if spec.model.startswith("/") and not (Path(spec.model) / "config.json").is_file():
        raise CompatError(
            f"spec.finetune.model: {spec.model} has no config.json; name a folder in Hugging Face format "
            "that podTemplate.volumes mounts"
        )


def _model(transformers: Any, spec: FinetuneSpec) -> tuple[Any, Any]:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(spec.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(spec.model, dtype="float32")
    except (OSError, ValueError) as error:
        check_name(spec, "model", spec.model, "model", error)
        raise CompatError(
            f"spec.finetune.model: {spec.model} cannot be loaded: {error}; name a causal "
            "language model and its tokenizer, in Hugging Face format or on the hub"
        ) from error
    if spec.chat_template is not None:
        tokenizer.chat_template = _template(spec.chat_template)
    return model, tokenizer


def _template(text: str) -> str:
    if not text.startswith("/"):
        return text
    try:
        return Path(text).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CompatError(
            f"spec.finetune.chatTemplate: {text} cannot be read: {error}; mount the file with "
            "podTemplate.volumes, or give its text"
        ) from error


def _adapter(spec: FinetuneSpec, model: Any) -> Any:
    """Return the adapter's configuration, None for a training of all weights. Raises CompatError."""
    if spec.method != "lora":
        return None
    lora = spec.lora
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if _is_linear(module)}
    if unknown := sorted(set(lora.targets) - names):
        raise CompatError(
            f"spec.finetune.lora.targets: {unknown[0]!r} is no linear layer of {spec.model}, which has "
            f"{', '.join(sorted(names))}"
        )
    return _library("peft").LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or ALL_LINEAR,
        task_type="CAUSAL_LM",
    )


def _is_linear(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def _callbacks(transformers: Any, spec: FinetuneSpec) -> list[Any]:
    early = spec.early_stopping
    if early is None:
        return []
    return [
        transformers.EarlyStoppingCallback(
            early_stopping_patience=early.patience, early_stopping_threshold=early.threshold
        )
    ]


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise CompatError(
            f"spec.finetune needs transformers, accelerate, trl, peft and datasets; {error}: "
            "install it in the image"
        ) from error
