"""Contenders of `bench_trainer.py`: transformers' Trainer and loops of one's own, on DDP and on this engine.

All train the same Llama of random weights in fp32, with AdamW and the Trainer's bound of the norm.
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.benchmarks.contenders import BETAS, LR, Contender, Sizes, engine_step

MAX_NORM = 1.0
"""The Trainer's default."""
ENDLESS = 1_000_000
"""Steps of a Trainer, more than any benchmark takes."""
STAGES = (1, 3)


def _llama(sizes: Sizes) -> Any:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.d_model,
        intermediate_size=4 * sizes.d_model,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=sizes.context + 1,
    )
    return transformers.LlamaForCausalLM(config)


def _config(stage: int, sizes: Sizes) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "weight_decay": 0.0}},
    }


def own_ddp(sizes: Sizes) -> Contender:
    """Build a loop of one's own over DDP, with fused AdamW and torch's bound of the norm."""
    wrapped = nn.parallel.DistributedDataParallel(_llama(sizes), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

    def step(batch: torch.Tensor) -> float:
        loss = wrapped(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return Contender(step=step)


def own_engine(stage: int) -> Callable[[Sizes], Contender]:
    """Return a builder of a loop of one's own over this engine."""

    def build(sizes: Sizes) -> Contender:
        import zerotrain.runtime as zt

        engine = zt.initialize(model=_llama(sizes), config=_config(stage, sizes))[0]
        step = engine_step(engine, lambda batch: engine(input_ids=batch, labels=batch).loss)
        return Contender(step=step)

    return build


def trainer(stage: int | None) -> Callable[[Sizes], Contender]:
    """Return a builder of a Trainer on this engine, or on DDP for None."""

    def build(sizes: Sizes) -> Contender:
        if stage is not None:
            # Before transformers is imported.
            importlib.import_module("zerotrain.compat").deepspeed()
        return Contender(step=_Stepper(sizes, None if stage is None else _config(stage, sizes)))

    return build


class _Stepper:
    """A Trainer in a thread of its own that goes one step at each call, from the end of a step to that of the
    next: its loader and its callbacks count."""

    def __init__(self, sizes: Sizes, config: dict[str, Any] | None) -> None:
        """Begin to train. `config` is the engine's; None means DDP."""
        self._sizes, self._config = sizes, config
        self._batches: queue.Queue[torch.Tensor] = queue.Queue()
        self._ended: queue.Queue[float | BaseException] = queue.Queue()
        self._batch: torch.Tensor | None = None
        threading.Thread(target=self._train, daemon=True).start()

    def __call__(self, batch: torch.Tensor) -> float:
        """Do one step. Returns 0: reading the loss is not what a Trainer does at each step."""
        self._batches.put(batch)
        ended = self._ended.get()
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def _train(self) -> None:
        try:
            self._batch = self._batches.get()
            self._trainer().train()
        except BaseException as error:
            self._ended.put(error)

    def _trainer(self) -> Any:
        transformers: Any = importlib.import_module("transformers")
        stepper, sizes = self, self._sizes

        class Rows(torch.utils.data.Dataset[int]):
            def __len__(self) -> int:
                return ENDLESS

            def __getitem__(self, index: int) -> int:
                return index

        def collate(_: list[int]) -> dict[str, Any]:
            return {"input_ids": stepper._batch, "labels": stepper._batch}

        class Wait(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *_: Any, **__: Any) -> None:
                stepper._ended.put(0.0)
                stepper._batch = stepper._batches.get()

        arguments = transformers.TrainingArguments(
            output_dir="build/bench-trainer",
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=sizes.micro,
            max_steps=ENDLESS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0,
            max_grad_norm=MAX_NORM,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            deepspeed=self._config,
        )
        return transformers.Trainer(
            model=_llama(sizes),
            args=arguments,
            train_dataset=Rows(),
            data_collator=collate,
            callbacks=[Wait()],
        )


TRAINERS: Mapping[str, Callable[[Sizes], Contender]] = {
    "own-ddp": own_ddp,
    **{f"own-zerotrain-{stage}": own_engine(stage) for stage in STAGES},
    "trainer-ddp": trainer(None),
    **{f"trainer-zerotrain-{stage}": trainer(stage) for stage in STAGES},
}
