"""Inputs of a run, read in the order in which the errors of a wrong job are reported: settings, data, model.

Cheap checks come before the rendezvous, so that a job with a typo ends in seconds on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zerotrain.contract.config import EngineConfig, load, resolve
from zerotrain.contract.presets import auto_values
from zerotrain.contract.train_spec import TrainSpec
from zerotrain.contract.worker_environment import LaunchError, LaunchSpec, RankEnv
from zerotrain.runtime.data import Corpus, Shape, TokenLoader, open_corpus, with_tokenizer
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.initialization import initialize
from zerotrain.runtime.models import BuiltModel, build_model
from zerotrain.runtime.setup import read_config
from zerotrain.runtime.train import rendezvous
from zerotrain.runtime.train.determinism import choose_deterministic_kernels, seed_everything
from zerotrain.runtime.train.exits import read_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Contents of the environment and the files; nothing is built yet."""

    launch: LaunchSpec
    rank: RankEnv
    spec: TrainSpec
    config: EngineConfig

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """Read the environment and the files. Raises LaunchError, TrainSpecError or ConfigError naming what
        is wrong."""
        launch, rank = LaunchSpec.from_env(environ), RankEnv.from_env(environ)
        if launch.train_spec_path is None:
            raise LaunchError(
                "launch environment: the built-in trainer needs its training part and none is named; "
                "give the job model, data and steps, or a command of its own"
            )
        spec = TrainSpec.from_json(read_text(launch.train_spec_path, "training part"))
        read_text(launch.config_path, "configuration")
        gpt, preset = spec.model.gpt, spec.model.preset
        auto = auto_values(d_model=gpt.d_model if gpt else None, preset=preset, steps=spec.steps)
        config = resolve(load(launch.config_path), world_size=launch.world_size, auto=auto)
        return cls(
            launch=launch,
            rank=rank,
            spec=spec,
            config=read_config(config, world_size=launch.world_size),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A run that is ready for its first step, or to be resumed."""

    settings: Settings
    engine: Engine
    loader: TokenLoader
    model: BuiltModel
    corpus: Corpus
    threads: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.settings.config.batch.train_batch_size * self.model.context


def check_inputs(settings: Settings) -> tuple[Corpus, BuiltModel]:
    """Open the data and build the model. Raises DataError or ModelError."""
    corpus = open_corpus(settings.spec.data_path)
    seed_everything(settings.spec.seed)
    checkpointing = settings.config.activation_checkpointing.configured
    model = build_model(settings.spec, checkpoint_activations=checkpointing)
    if settings.spec.model.path is not None:
        corpus = with_tokenizer(corpus, settings.spec.data_path, settings.spec.model.path)
    return corpus, model


def build(settings: Settings, corpus: Corpus, model: BuiltModel) -> Session:
    """Join the other ranks and take the model over. Collective. Raises RendezvousTimeout."""
    choose_deterministic_kernels()
    rank = settings.rank.rank
    loader = TokenLoader(
        corpus,
        Shape(
            rank=rank,
            world_size=settings.launch.world_size,
            batch=settings.config.batch,
            context=model.context,
        ),
        seed=settings.spec.seed,
        vocabulary=model.vocabulary,
    )
    rendezvous.join(settings.launch, settings.rank)
    engine, *_ = initialize(model=model.module, config=settings.config)
    # From here on random numbers (dropout) must differ between ranks; a checkpoint restores its own state.
    seed_everything(settings.spec.seed, rank)
    return Session(
        settings=settings,
        engine=engine,
        loader=loader,
        model=model,
        corpus=corpus,
        threads=torch.get_num_threads(),  # as the launcher divided the cores among the ranks
    )
