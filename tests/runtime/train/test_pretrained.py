"""The trainer continues from a Hugging Face folder, on token ids or on text with the folder's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.hf_folders import save, token_ids
from tests.support.trainer_runs import TEXT, TrainerRun, config, job
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.train_spec import ModelSpec, TrainSpec
from zerotrain.runtime.data.corpus import Corpus
from zerotrain.runtime.data.errors import DataError
from zerotrain.runtime.data.sources import open_corpus, with_tokenizer
from zerotrain.runtime.models import build_model
from zerotrain.runtime.models.factory import ModelError

pytestmark = pytest.mark.ranks


def add_tokenizer(folder: Path) -> Tokenizer:
    """Add a tokenizer of the printable characters, with ids below 96."""
    vocabulary = {chr(32 + index): index for index in range(90)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "?": 31}, merges=[], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "removed")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def run_on(folder: Path, data: Path, model: Path) -> TrainerRun:
    spec = job(model={"path": str(model)}, data_path=str(data), steps=2, context=16, checkpoint={})
    settings = config(optimizer={"type": "AdamW", "params": {"lr": 0.0}}, bf16={"enabled": False})
    del settings["scheduler"]
    return TrainerRun(folder, spec, world_size=2, config=settings, checkpoint_dir=folder / "checkpoints")


def test_training_starts_from_the_folders_weights(tmp_path: Path) -> None:
    model = save("qwen2", tmp_path / "model")
    ids = token_ids(batch=1, tokens=16).flatten()
    ids.repeat(40).numpy().astype(np.uint16).tofile(tmp_path / "ids.uint16.bin")  # every sample is the same
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0]
    expected = float(torch.nn.functional.cross_entropy(logits, ids.roll(-1)))
    run = run_on(tmp_path / "run", tmp_path / "ids.uint16.bin", tmp_path / "model").start()
    run.finish()
    assert [float(loss) for loss in run.losses().values()] == pytest.approx([expected] * 2, rel=1e-3)
    assert abs(expected - np.log(96)) > 0.05, "fresh weights would pass too"


def ids_of(folder: Path) -> Corpus:
    text = str(folder / "a.txt")
    return with_tokenizer(open_corpus(text), text, str(folder / "model"))


def test_text_becomes_the_models_ids(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "model")
    tokenizer = add_tokenizer(tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXT)
    corpus = ids_of(tmp_path)
    ids = tokenizer.encode(TEXT).ids
    assert corpus.read(0, corpus.num_tokens).tolist() == ids
    settings = tmp_path / "model" / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": [7, 8]}))
    corpus = ids_of(tmp_path)
    assert corpus.read(0, corpus.num_tokens).tolist() == [*ids, 7]


def test_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXT)
    run = run_on(tmp_path / "run", tmp_path / "a.txt", tmp_path / "model").start()
    assert run.wait() == [ExitCode.BAD_DATA] * 2
    assert "has no tokenizer.json to make its ids; add it, or give token ids" in run.log(0)
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        ids_of(tmp_path)


def built(folder: Path, **changes: Any) -> Any:
    return build_model(TrainSpec(model=ModelSpec(path=str(folder)), data_path="x", steps=1, **changes))


def test_context_and_vocabulary_come_from_the_folder(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    assert (built(tmp_path).context, built(tmp_path).vocabulary) == (64, 96)
    assert built(tmp_path, context=16).context == 16
    with pytest.raises(ModelError, match="context 65 exceeds the 64 positions"):
        built(tmp_path, context=65)
