"""`zerotrain.runtime.initialize`: makes an engine of a model."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.facade.arguments import Arguments, ConfigSource, taking
from zerotrain.runtime.facade.evaluation import for_evaluation, trains_on_ranks
from zerotrain.runtime.facade.observer import announce
from zerotrain.runtime.notices import log_gradient_access, log_kernels, log_notices
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.schedule import Schedule
from zerotrain.runtime.optim.user_optimizer import make_optimizer, make_schedule
from zerotrain.runtime.setup import (
    build_loader,
    check_model,
    configure_activations,
    join_ranks,
    make_layout,
    read_config,
    settle_encoding,
)
from zerotrain.runtime.trackers.libraries import check_trackers
from zerotrain.runtime.zero.transforms import outside_inference_mode


@taking(Arguments)
def initialize(asked: Arguments) -> tuple[Engine, ZeroOptimizer, DataLoader[Any] | None, Schedule | None]:
    """Take a model over for training on all ranks: `(engine, optimizer, loader, scheduler)`. Collective.

    The arguments are those of DeepSpeed, in its order, and `unit_modules`; pass them by keyword. `model` and
    a configuration are required.

    Args:
        args: an object whose `deepspeed_config` names the configuration, where `config` does not.
        model: built normally on every rank (rank 0's values are used) or on the meta device within
            `init_context`. It moves to this rank's device.
        optimizer, lr_scheduler: torch's, or functions that make them; None = as configured. Where neither
            gives a schedule, the fourth value is None and every group keeps its rate.
        model_parameters: parameters, (name, parameter) pairs or parameter groups as for a torch optimizer;
            None = all trainable ones.
        training_data: a map-style or iterable data set; the loader gives each rank its part in micro-batches,
            in a new order in every epoch. None = no loader.
        distributed_port: port of the rendezvous, where the environment sets no MASTER_PORT.
        mpu: object with the groups of tensor parallelism, like Megatron's.
        dist_init_required: False = the process group must exist already.
        collate_fn: for the loader.
        config: DeepSpeed-style JSON as a file, text or mapping, or already resolved.
        config_params: the older name of `config`.
        unit_modules: names or classes of the modules that are gathered as a whole; None = found by rule
            (`zero/plan.py`).

    Raises ConfigError when the configuration is wrong or asks for what this version does not run, LayoutError
    when the model cannot be laid out, GroupError for wrong parameter groups.

    The method is ZeRO, https://arxiv.org/abs/1910.02054, with one flat buffer per unit.
    """
    assert asked.model is not None  # `Arguments` checks it
    source = asked.config_source()
    asked.apply_port()
    comm = join_ranks(asked.mpu)
    try:
        with outside_inference_mode():
            made = _take_over(asked.model, source, asked, comm)
            announce(made[0])
            return made
    except BaseException as error:
        comm.note_error(error)
        comm.close()
        raise


def _take_over(
    model: nn.Module, source: ConfigSource, asked: Arguments, comm: Comm
) -> tuple[Engine, ZeroOptimizer, DataLoader[Any] | None, Schedule | None]:
    """Do the part of `initialize` that follows the making of the process groups."""
    supplied = () if asked.mpu is None else ("mpu",)
    resolved = read_config(source, world_size=comm.world_size, model=model, supplied=supplied)
    log_notices(resolved, source, comm)
    log_kernels(resolved, comm)
    configure_activations(resolved, asked.mpu)
    check_model(model)
    check_trackers(resolved.trackers)
    if not trains_on_ranks(model, comm):
        resolved, asked = for_evaluation(resolved, asked)
    plan = partial(make_layout, model, resolved, asked.unit_modules)
    optimizer = make_optimizer(
        model, plan(), resolved, optimizer=asked.optimizer, model_parameters=asked.model_parameters
    )
    resolved = settle_encoding(resolved, optimizer)
    schedule = make_schedule(optimizer, resolved, asked.lr_scheduler)
    loader = build_loader(asked.training_data, resolved, comm, asked.collate_fn)
    engine = Engine(
        model,
        resolved,
        comm=comm,
        optimizer=optimizer,
        schedule=schedule,
        plan=plan,
        loader=loader,
        collate_fn=asked.collate_fn,
    )
    if resolved.trackers and not engine.is_evaluation_only:
        samples = resolved.batch.train_batch_size
        engine.monitor.open(resolved.trackers, samples_per_step=samples, writes=comm.rank == 0)
    log_gradient_access(resolved, engine.core, comm)
    return engine, engine.optimizer, loader, engine.scheduler
