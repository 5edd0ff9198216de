"""Choice of the mildest ZeRO stage and offload with which the job fits, and the job as YAML with comments."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from zerotrain.cli.init.answers import Answers
from zerotrain.contract.planner import Fit, ModelShape, ShapeError, Tier, bytes_text, demand
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.plan_inputs import workload_of
from zerotrain.operator.constants import API_VERSION, KIND


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to run the job."""

    stage: int
    recompute: bool = False
    optimizer: str | None = None
    """Device that optimizer states are offloaded to: cpu or nvme."""
    parameters: str | None = None
    """Device that weights are offloaded to."""

    @property
    def text(self) -> str:
        parts = [f"stage {self.stage}"]
        parts += ["activation checkpointing"] if self.recompute else []
        parts += [f"optimizer states on {self.optimizer}"] if self.optimizer else []
        parts += [f"weights on {self.parameters}"] if self.parameters else []
        return ", ".join(parts)

    def config(self, answers: Answers) -> dict[str, Any]:
        """Return the DeepSpeed-style configuration of this choice."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.optimizer:
            zero["offload_optimizer"] = {"device": self.optimizer}
        if self.parameters:
            zero["offload_param"] = {"device": self.parameters}
            if self.parameters == "nvme":
                zero["offload_param"]["max_in_cpu"] = 0
        return {
            "train_micro_batch_size_per_gpu": answers.micro_batch,
            "gradient_accumulation_steps": answers.accumulation,
            # On many CPUs bf16 takes tens of times as long as fp32, so a CPU job has to enable it explicitly.
            **({"bf16": {"enabled": True}} if answers.gpus else {}),
            "zero_optimization": zero,
            **({"activation_checkpointing": {}} if self.recompute else {}),
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": answers.learning_rate, "weight_decay": 0.01}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_type": "linear", "warmup_num_steps": max(2, answers.steps // 20)},
            },
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The chosen configuration and the reason for it."""

    choice: Choice
    reason: str


def propose(answers: Answers, *, shape: ModelShape | None, given: Choice | None) -> Proposal:
    """Return the choice that was given, or the first that fits. `shape` is needed if the spec has none."""
    if given is not None:
        return Proposal(choice=given, reason="As requested.")
    tight: Choice | None = None
    tried: list[Choice] = []
    for choice in _choices(answers):
        fit = _fit(answers, choice, shape)
        if fit is None or fit is Fit.UNKNOWN:
            return _unknown(answers, planned=fit is not None)
        if fit is Fit.FITS:
            refused = f"; {tried[-1].text} leaves too little memory" if tried else ""
            return Proposal(choice=choice, reason=f"The first that fits, by the memory planner{refused}.")
        if fit is Fit.TIGHT and tight is None:
            tight = choice
        tried.append(choice)
    if tight is not None:
        return Proposal(
            choice=tight, reason="Tight, by the memory planner: no other choice needs less memory."
        )
    return Proposal(
        choice=tried[-1], reason="Does not fit, by the memory planner: take more workers or larger ones."
    )


def _unknown(answers: Answers, *, planned: bool) -> Proposal:
    """Return a proposal without a plan: stage 3 for several ranks, else stage 0."""
    why = "the memory of the workers is not known" if planned else "the size of the model is not known"
    stage = 3 if answers.num_ranks > 1 else 0
    return Proposal(choice=Choice(stage=stage), reason=f"Not planned: {why}; zerotrain plan shows more.")


def _choices(answers: Answers) -> Iterator[Choice]:
    """Yield the choices from the fastest to the one that needs the least memory of the accelerator."""
    stages = (0, 1, 2, 3) if answers.num_ranks > 1 else (0,)
    yield from (Choice(stage=stage) for stage in stages)
    last = stages[-1]
    yield Choice(stage=last, recompute=True)
    if answers.gpus:
        yield Choice(stage=last, recompute=True, optimizer="cpu")
    if last == 3 and answers.gpus:
        yield Choice(stage=3, recompute=True, optimizer="cpu", parameters="cpu")
    if answers.nvme is not None:
        yield Choice(stage=last, recompute=True, optimizer="nvme")
        if last == 3:
            yield Choice(stage=3, recompute=True, optimizer="nvme", parameters="nvme")


def as_object(answers: Answers, choice: Choice) -> dict[str, Any]:
    """Return the job as the object that kubectl would send."""
    spec: dict[str, Any] = {"workers": answers.workers, "image": answers.image, "model": dict(answers.model)}
    spec |= {"data": {"path": answers.data}, "steps": answers.steps}
    resources: dict[str, Any] = {}
    if answers.gpus:
        resources["gpus"] = {"count": answers.gpus}
        if answers.device is not None:
            resources["gpus"]["memory"] = f"{answers.device.memory_mib}Mi"
    resources |= {"cpu": answers.cpu} if answers.cpu else {}
    resources |= {"memory": answers.memory} if answers.memory else {}
    spec |= {"resources": resources} if resources else {}
    if answers.nvme is not None:
        spec["nvme"] = {"size": answers.nvme, "encryption": "AEAD"}
    if answers.claim is not None:
        volume = {"persistentVolumeClaim": {"claimName": answers.claim}}
        spec["checkpoint"] = {"volume": volume, "everySteps": answers.every_steps, "keepLast": 3}
    spec["config"] = choice.config(answers)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": answers.name}, "spec": spec}


def _fit(answers: Answers, choice: Choice, shape: ModelShape | None) -> Fit | None:
    """Return whether the job fits with a choice, by the planner; None if the model's size is not known."""
    spec = ZeroTrainingJob.parse(as_object(answers, choice)).spec
    try:
        found = demand(workload_of(spec, shape=shape, device=answers.device))
    except ShapeError:
        return None
    computes = found.tier(Tier.GPU if answers.gpus else Tier.HOST)
    if computes is None or computes.limit is None:
        return Fit.UNKNOWN
    # Of the other tiers only those with a known size count.
    known = [tier.verdict for tier in found.tiers if tier.limit is not None]
    return next((item for item in (Fit.DOES_NOT_FIT, Fit.TIGHT) if item in known), Fit.FITS)


HEAD = """A training job for zerotrain.
Here:           zerotrain run {file}
In a cluster:   zerotrain submit {file}
What it needs:  zerotrain plan {file}
Every field:    kubectl explain ztj.spec
"""

COMMENTS = {
    ("workers",): "Pods; each has one rank per GPU, or one without GPUs.",
    ("image",): "Must hold the zerotrain runtime.",
    ("steps",): "Optimizer steps, over all restarts.",
    ("resources",): "Of each worker; requests equal limits.",
    ("nvme",): "A volume of each worker for state that is spilled out of memory, encrypted.",
    ("checkpoint",): "Without it a restart begins at step 0.",
    ("config",): "A DeepSpeed-style configuration; zerotrain config check explains every key.",
}


def as_yaml(answers: Answers, proposal: Proposal, *, file: str) -> str:
    """Return the text of the file."""
    root = _commented(as_object(answers, proposal.choice))
    root.yaml_set_start_comment(HEAD.format(file=file))
    spec = root["spec"]
    for (key,), text in COMMENTS.items():
        if key in spec:
            spec.yaml_set_comment_before_after_key(key, before=text, indent=2)
    zero = f"{proposal.choice.text}. {proposal.reason}"
    spec["config"].yaml_set_comment_before_after_key("zero_optimization", before=zero, indent=4)
    if answers.gpus and answers.device is not None:
        device = answers.device
        spec["resources"]["gpus"].yaml_add_eol_comment(
            f"{device.name}: {bytes_text(device.memory_bytes)}, for the memory planner", "memory"
        )
    yaml = YAML()
    yaml.width = 100
    yaml.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    yaml.dump(root, stream)
    return stream.getvalue()


def _commented(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    made = CommentedMap()
    for key, item in value.items():
        made[key] = _commented(item)
    return made
