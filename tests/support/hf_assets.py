"""Tiny models of random weights with a tokenizer, and JSONL files, for the scripts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)
WORDS = ("red", "green", "blue", "one", "two", "three", "four", "cat", "dog", "bird", "sings", "runs", "now")
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?0123456789:\n"


def save_tokenizer(folder: Path) -> Any:
    """Save a tokenizer of single characters with a chat template."""
    from tokenizers import Tokenizer, decoders, models

    transformers: Any = importlib.import_module("transformers")
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {text: number for number, text in enumerate([*special, *CHARACTERS])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return made


def save_models(folder: Path, *, width: int = 32, layers: int = 2) -> None:
    """Save causal models, a classifier and a reward model with the tokenizer in folders of their names."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.LlamaConfig(**sizes)
    kinds: dict[str, Any] = {
        "causal": transformers.LlamaForCausalLM(config),
        "teacher": transformers.LlamaForCausalLM(config),
        "classifier": transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**sizes, num_labels=2)
        ),
        "reward": transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**sizes, num_labels=1)
        ),
    }
    for name, model in kinds.items():
        torch.manual_seed(len(name))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        _save(model, folder / name)
    _save(kinds["causal"].bfloat16(), folder / "causal-bf16")


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    save_tokenizer(folder)


def sentence(number: int) -> str:
    """Return a sentence of five words, another one for each number."""
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in (1, 3, 5, 7, 11))


def save_data(folder: Path, rows: int = 96) -> None:
    """Save a folder of train and test rows for each kind of training."""
    for kind, row in ROWS.items():
        target = folder / kind
        target.mkdir(parents=True, exist_ok=True)
        for split, first in (("train", 0), ("test", 1000)):
            lines = [json.dumps(row(number)) for number in range(first, first + (rows if first == 0 else 16))]
            (target / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def _chat(text: str, role: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


ROWS: dict[str, Any] = {
    "text": lambda n: {"text": sentence(n)},
    "labels": lambda n: {"text": sentence(n), "label": n % 2},
    "chat": lambda n: {"messages": _chat(sentence(n), "user") + _chat(sentence(n + 1), "assistant")},
    "preferences": lambda n: {
        "prompt": _chat(sentence(n), "user"),
        "chosen": _chat(sentence(n + 1), "assistant"),
        "rejected": _chat(sentence(n + 2), "assistant"),
    },
    "unpaired": lambda n: {
        "prompt": _chat(sentence(n), "user"),
        "completion": _chat(sentence(n + 1), "assistant"),
        "label": n % 3 > 0,
    },
    "prompts": lambda n: {"prompt": _chat(sentence(n), "user")},
}
