"""The training scripts that run unchanged, and the tiers in which they run."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import hf_assets

OWN = Path(__file__).parent.parent / "huggingface" / "scripts"

STEPS = 20

TIERS: Mapping[str, Mapping[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3 cpu": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "3 nvme": {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}
"""ZeRO blocks. The spill of "3 nvme" is encrypted, as without a key that says otherwise."""

TRAINER = (
    *("--max_steps", str(STEPS), "--per_device_train_batch_size", "2", "--seed", "1"),
    *("--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "true", "--output_dir", "out"),
)
CLM = (
    *("--model", "{models}/causal", "--data", "{data}/text", "--gradient_accumulation_steps", "2"),
    *("--learning_rate", "1e-2", "--warmup_steps", "3", "--max_grad_norm", "0.5", "--save_steps", "10"),
    *("--eval_strategy", "steps", "--eval_steps", "10", *TRAINER),
)
TRL = (
    *("--model_name_or_path", "{models}/causal", "--learning_rate", "1e-3", "--bf16", "false"),
    *("--lr_scheduler_type", "constant", "--gradient_checkpointing", "false", "--save_steps", "10", *TRAINER),
)
LORA = (
    *("--use_peft", "--lora_r", "4", "--lora_dropout", "0"),
    *("--lora_target_modules", "q_proj", "v_proj"),
)
REWARDED = ("--reward_model_name_or_path", "{models}/reward", "--dataset_name", "{data}/prompts")
GENERATED = ("--max_completion_length", "16", "--num_generations", "2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One script with its arguments."""

    script: str
    """File below tests/huggingface/scripts, or `package:path` of one that a package ships."""
    arguments: tuple[str, ...]
    tier: str
    """Tier that CI runs."""
    digest: str = ""
    """First digits of the SHA-256 of a script of others."""

    @property
    def path(self) -> Path:
        """The script, which is checked to be the one that was pinned."""
        if not self.digest:
            return OWN / self.script
        package, _, rest = self.script.partition(":")
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        found = Path(spec.origin).parent / rest
        digest = hashlib.sha256(found.read_bytes()).hexdigest()
        assert digest.startswith(self.digest), f"{found} is another version, {digest[:16]}"
        return found


def _trl(name: str, digest: str, tier: str, *arguments: str) -> Case:
    return Case(script=f"trl:scripts/{name}.py", digest=digest, tier=tier, arguments=(*TRL, *arguments))


OWN_CASES: Mapping[str, Case] = {
    "trainer": Case(script="trainer_clm.py", arguments=CLM, tier="3 nvme"),
    "trainer, optimizer in the JSON": Case(
        script="trainer_clm.py", arguments=(*CLM, "--lr_scheduler_type", "cosine"), tier="1"
    ),
    "trainer, best model": Case(script="trainer_best.py", arguments=CLM, tier="3"),
    "trainer, checkpointed activations": Case(
        script="trainer_clm.py", arguments=(*CLM, "--gradient_checkpointing", "true"), tier="3"
    ),
    "trainer, compiled": Case(
        script="trainer_clm.py", arguments=(*CLM, "--torch_compile_backend", "aot_eager"), tier="3"
    ),
    "accelerate": Case(
        script="accelerate_loop.py",
        arguments=("--model", "{models}/classifier", "--data", "{data}/labels", "--output_dir", "out"),
        tier="3 cpu",
    ),
    "accelerate, two models": Case(script="accelerate_models.py", arguments=(), tier="3 cpu"),
    "lora": Case(script="peft_clm.py", arguments=CLM, tier="3"),
    "lora, trained tokens": Case(script="peft_clm.py", arguments=(*CLM, "--tokens", "5", "9"), tier="3"),
    "dora": Case(script="peft_clm.py", arguments=(*CLM, "--method", "dora"), tier="3 cpu"),
    **{
        f"peft, {method}": Case(script="peft_clm.py", arguments=(*CLM, "--method", method), tier=tier)
        for method, tier in {
            "parameters": "3",
            "ia3": "2",
            "vera": "3",
            "loha": "3 nvme",
            "oft": "3 cpu",
            "ln": "1",
            "prompt": "3",
            "prefix": "3",
        }.items()
    },
    "lightning": Case(script="lightning_fit.py", arguments=("--output_dir", "out"), tier="3"),
    "fabric": Case(script="fabric_loop.py", arguments=("--output_dir", "out"), tier="3"),
    "trainer of one's own": Case(
        script="trainer_own.py",
        arguments=(
            *("--model", "{models}/classifier", "--data", "{data}/labels", *TRAINER),
            *("--gradient_accumulation_steps", "3", "--max_grad_norm", "0.3"),
        ),
        tier="3 cpu",
    ),
    "seq2seq": Case(script="seq2seq.py", arguments=(*CLM, "--label_smoothing_factor", "0.1"), tier="3"),
    "dpo, reference first": Case(
        script="dpo_reference.py",
        arguments=(
            *("--model", "{models}/causal", "--data", "{data}/preferences", "--max_length", "64", *TRAINER),
            *("--bf16", "false", "--gradient_checkpointing", "false", "--learning_rate", "1e-3"),
        ),
        tier="3",
    ),
}
OTHERS_CASES: Mapping[str, Case] = {
    "sft": _trl("sft", "310f4eb5f750a8f2", "3", "--dataset_name", "{data}/chat", "--max_length", "64"),
    "sft, lora": _trl(
        "sft", "310f4eb5f750a8f2", "3 nvme", "--dataset_name", "{data}/chat", "--max_length", "64", *LORA
    ),
    "sft, packed": _trl(
        "sft", "310f4eb5f750a8f2", "2", "--dataset_name", "{data}/chat", "--max_length", "64", "--packing"
    ),
    "dpo": _trl("dpo", "faf93f88277ddb87", "3", "--dataset_name", "{data}/preferences", "--max_length", "64"),
    "dpo, lora": _trl(
        "dpo", "faf93f88277ddb87", "1", "--dataset_name", "{data}/preferences", "--max_length", "64", *LORA
    ),
    "reward": _trl(
        *("reward", "4b2209c6ab086919", "3 cpu", "--model_name_or_path", "{models}/reward"),
        *("--dataset_name", "{data}/preferences", "--max_length", "64"),
    ),
    "reward, lora": _trl(
        *("reward", "4b2209c6ab086919", "2", "--model_name_or_path", "{models}/reward"),
        *("--dataset_name", "{data}/preferences", "--max_length", "64", *LORA, "--lora_task_type", "SEQ_CLS"),
    ),
    "grpo": _trl("grpo", "3d7de1a28d39c940", "3", *REWARDED, *GENERATED),
    "grpo, lora": _trl("grpo", "3d7de1a28d39c940", "3 cpu", *REWARDED, *GENERATED, *LORA),
    "rloo": _trl("rloo", "dc69ad03f5993634", "2", *REWARDED, *GENERATED),
    "kto": _trl("kto", "a0ec1892190afef4", "3", "--dataset_name", "{data}/unpaired", "--max_length", "64"),
    "distillation": _trl(
        *("distillation", "66d9d86442182a2d", "3", "--teacher_model_name_or_path", "{models}/teacher"),
        *("--dataset_name", "{data}/prompts", "--max_completion_length", "16"),
    ),
}
IN_ALL_TIERS = ("trainer",)
"""Cases that CI runs in every tier."""
LEFT_OUT = (
    *("trainer, compiled", "peft, ia3", "peft, loha", "peft, ln", "peft, prefix"),
    *("grpo, lora", "rloo", "reward, lora", "distillation"),
)
"""Cases that `make test-hf` alone runs, as all of them take CI too long."""


@dataclass(frozen=True, kw_only=True)
class Assets:
    """Folders of the models and of the data."""

    folder: Path

    def make(self, **sizes: int) -> Assets:
        """Write them; `sizes` are the models'."""
        hf_assets.save_models(self.folder / "models", **sizes)
        hf_assets.save_data(self.folder / "data")
        return self

    def arguments(self, given: tuple[str, ...]) -> list[str]:
        """Return arguments with the folders in place of their names."""
        return [each.format(models=self.folder / "models", data=self.folder / "data") for each in given]


def write_config(folder: Path, tier: str, *, optimizer: bool = False, schedule: bool = False) -> Path:
    """Write the DeepSpeed JSON of a tier, as users of the Trainer write it; return the file.

    `optimizer` and `schedule` say what it names itself; the schedule is the Trainer's default.
    """
    zero: dict[str, Any] = json.loads(json.dumps(TIERS[tier]))
    for block in zero.values():
        if isinstance(block, dict) and block["device"] == "nvme":
            block["nvme_path"] = str(folder / "spill")
    if zero["stage"] == 3:
        zero |= {
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": "auto",
            "stage3_prefetch_bucket_size": "auto",
        }
    config: dict[str, Any] = {
        "zero_optimization": {**zero, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 2000,
    }
    if optimizer:
        params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": params}
    if schedule:
        names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        params = {**dict.fromkeys(names, "auto"), "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": params}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spill").mkdir(exist_ok=True)
    (folder / "ds.json").write_text(json.dumps(config))
    return folder / "ds.json"
