"""Steps of `initialize` before the engine exists: join the ranks, read the configuration, lay the model
out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import Dataset

from zerotrain.contract.config import AutoValues, ConfigError, EngineConfig, load, resolve
from zerotrain.contract.config.encoding import BF16_MASTERS, REMAINDERS, can_split_master, can_update_bf16
from zerotrain.contract.config.schema import CompileConfig
from zerotrain.contract.memory.moved import keeps_own_gradients, shards_parameters
from zerotrain.runtime.activation.settings import Settings, adopt
from zerotrain.runtime.comm.group import Comm, pick_device
from zerotrain.runtime.comm.model_parallel import ModelParallel
from zerotrain.runtime.comm.worlds import check_worlds
from zerotrain.runtime.compiling.check import check_compilation
from zerotrain.runtime.compiling.units import CompiledUnits, unit_modules
from zerotrain.runtime.config_check import check_same_config
from zerotrain.runtime.construct.buffers import BufferRules, check_buffers
from zerotrain.runtime.construct.pending import is_pending
from zerotrain.runtime.construct.values import origins_of, take_values
from zerotrain.runtime.data.epochs import EpochLoader, make_loader
from zerotrain.runtime.fp8.choice import compute_in_fp8
from zerotrain.runtime.matmul_support import warn_of_slow_products
from zerotrain.runtime.offload.fit import check_fit
from zerotrain.runtime.offload.host_sums import HostSums, make_host_sums
from zerotrain.runtime.offload.params import OffloadedParams, make_param_tier
from zerotrain.runtime.offload.spill import open_spill_store
from zerotrain.runtime.offload.tiers import make_tiers
from zerotrain.runtime.offload.transfer import make_staging
from zerotrain.runtime.optim.joint import JointRule, refuse_offload
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.zero.buffer import return_free_memory
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.layout import DTYPE_BYTES, LayoutError, ModelLayout
from zerotrain.runtime.zero.leaves import with_marked
from zerotrain.runtime.zero.live import LiveLimits
from zerotrain.runtime.zero.names import check_names, named_parameters
from zerotrain.runtime.zero.options import CoreOptions, EngineCallbacks
from zerotrain.runtime.zero.placeholder import owner_of
from zerotrain.runtime.zero.plan import JOINED_NUMEL, MIN_UNIT_NUMEL, SmallParameters, plan_layout
from zerotrain.runtime.zero.sharded_model import ShardedModel
from zerotrain.runtime.zero.shards import Placement
from zerotrain.runtime.zero.ties import refuse_shared_memory
from zerotrain.runtime.zero.torch_calls import serve
from zerotrain.runtime.zero.wrapped import refuse_wrapped
from zerotrain.runtime.zero.zeropp import ZeroPlusPlus

if TYPE_CHECKING:
    from zerotrain.runtime.spill.store import SpillStore


def join_ranks(mpu: object | None = None) -> Comm:
    """Return the data-parallel group, of an mpu or of all ranks, on this rank's device. Collective.

    Raises TypeError naming what an mpu lacks, ValueError for one with pipeline stages, LaunchError if a
    library sees another number of ranks.
    """
    check_worlds()
    comm = Comm(device=pick_device(), group=ModelParallel.data_parallel_group(mpu))
    comm.model_parallel = ModelParallel.of(mpu)
    return comm


def read_config(
    source: EngineConfig | Mapping[str, Any] | Path | str,
    *,
    world_size: int,
    model: nn.Module | None = None,
    supplied: Collection[str] = (),
) -> EngineConfig:
    """Return the resolved configuration; `"auto"` takes values from the model.

    `supplied` names arguments of `initialize` (`mpu`) that enable settings which this version does not run
    otherwise. Raises ConfigError also for everything that this version accepts but does not run.
    """
    if isinstance(source, EngineConfig):
        config = source
    else:
        config = resolve(load(source), world_size=world_size, auto=_auto_values(model))
    if config.world_size != world_size:
        raise ConfigError(
            "world_size",
            f"the configuration must be resolved for the {world_size} ranks that run",
            config.world_size,
            "Resolve it again, or pass the file itself.",
        )
    values = {line.path: line.value for line in config.report}
    for item in config.unsupported:
        if item.lifted_by in supplied:
            continue
        # The report lists keys with older names under the newer ones.
        value = values.get(item.path, "a setting that asks for it")
        raise ConfigError(item.path, item.reason.rstrip("."), value, item.way_out)
    return config


def _auto_values(model: nn.Module | None) -> AutoValues:
    """Return the values that a Hugging Face model declares, by the Trainer's rules."""
    config = getattr(model, "config", None)
    for facts in (config, getattr(config, "text_config", None)):
        size = getattr(facts, "hidden_size", None) or max(getattr(facts, "hidden_sizes", ()) or (), default=0)
        if isinstance(size, int) and size > 0:
            return AutoValues(hidden_size=size)
    return AutoValues()


def settle_encoding(config: EngineConfig, optimizer: ZeroOptimizer) -> EngineConfig:
    """Return the configuration for the optimizer that really runs, which may be the caller's.

    Raises ConfigError where the file asks for remainders or for bf16 masters that its update cannot keep.
    """
    kind, params = optimizer.configured.type, optimizer.configured.params
    is_joint = isinstance(optimizer.rule, JointRule)
    if config.precision.bf16_masters and (is_joint or not can_update_bf16(kind)):
        raise ConfigError(
            BF16_MASTERS,
            f"needs an update in bf16, which {kind} has not",
            True,
            "Set it and bf16_optimizer_states to false, or use AdamW, Adam, SGD, Adagrad or Lion.",
        )
    if not config.precision.store_param_remainders or can_split_master(kind, params):
        return config
    if any(line.path == REMAINDERS and line.origin == "file" for line in config.report):
        raise ConfigError(
            REMAINDERS, f"needs a native update, which {kind} has not", True, "Set it to false, or use AdamW."
        )
    return replace(config, precision=replace(config.precision, store_param_remainders=False))


def configure_activations(config: EngineConfig, mpu: object | None) -> None:
    """Make `checkpoint_activations` follow the `activation_checkpointing` block, where there is one."""
    block = config.activation_checkpointing
    if block.configured:
        adopt(Settings.of(block, ModelParallel.of(mpu)))


def check_model(model: nn.Module) -> None:
    """Raise LayoutError for models whose parameters cannot be partitioned."""
    refuse_wrapped(model)
    check_names(model)
    for fqn, parameter in named_parameters(model):
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise LayoutError(
                f"parameter {fqn!r} is lazy; run one forward pass before zerotrain.runtime.initialize"
            )
        if parameter.layout.__str__() != "torch.strided":
            raise LayoutError(
                f"parameter {fqn!r} has layout {parameter.layout}; only dense parameters can be sharded"
            )
        if parameter.dtype not in TORCH_DTYPES.values():
            raise LayoutError(
                f"parameter {fqn!r} is of {parameter.dtype}, which cannot be sharded; known are "
                f"{sorted(TORCH_DTYPES)}. A complex one can be stored as torch.view_as_real(value), and used "
                "as torch.view_as_complex(parameter)"
            )
        if parameter.is_inference():
            raise LayoutError(
                f"parameter {fqn!r} was made within torch.inference_mode(), which forbids writes into it "
                "from then on; build or load the model outside of it"
            )
        owner = owner_of(parameter)
        if isinstance(owner, ShardedModel) and not owner.is_closed:
            raise LayoutError(
                f"parameter {fqn!r} belongs to an engine already; close() that one first, as it would train "
                "nothing any more"
            )
    unread = {name for name, parameter in named_parameters(model) if is_pending(parameter)}
    refuse_shared_memory(model, without=unread)
    origins_of(model)


def make_layout(
    model: nn.Module, config: EngineConfig, unit_modules: Sequence[str | type[nn.Module]] | None
) -> ModelLayout:
    """Return the units of the model for the configured precision and number of ranks."""
    on_host = pick_device().type == "cpu"
    return plan_layout(
        model,
        world_size=config.world_size,
        compute_dtype=config.precision.compute_dtype,
        unit_modules=unit_modules,
        min_unit_numel=config.zero.module_granularity_threshold or MIN_UNIT_NUMEL,
        joined_numel=joined_numel(config, on_host=on_host),
        leaves=with_marked(model, config.zero.leaf_module),
        small=SmallParameters(
            numel=config.zero.param_persistence_threshold, budget=config.zero.model_persistence_threshold
        )
        if shards_parameters(config, on_host=on_host)
        else None,
    )


def joined_numel(config: EngineConfig, *, on_host: bool) -> int:
    """Return the elements of the largest module whose units are joined: none on a CPU, where a call costs
    little, nor where the configuration says which modules are units."""
    return 0 if on_host or config.zero.module_granularity_threshold else JOINED_NUMEL


def build_core(
    model: nn.Module,
    config: EngineConfig,
    optimizer: ZeroOptimizer,
    comm: Comm,
    *,
    callbacks: EngineCallbacks,
    just_in_time: bool = False,
) -> ShardedModel:
    """Shard the model and the optimizer's states. Collective. `just_in_time`: updates may run in the
    background."""
    check_same_config(config, comm)
    warn_of_slow_products(config, comm)
    check_compilation(model, config.compile, comm.device)
    layout = optimizer.layout
    _check_agreement(layout, comm)
    check_buffers(model, comm)
    check_fit(model, config, layout, comm)
    spill_store = open_spill_store(config, comm)
    tier = make_param_tier(config, comm, spill_store)
    optimizer.registry.tiers = tiers = make_tiers(config, spill_store, defers=optimizer.is_default)
    sums = make_host_sums(config, comm, leaves=lambda unit: tiers.leaves(unit, optimizer.rule.kinds))
    options = _options(config, comm, tier, spill_store, sums, just_in_time=just_in_time)
    if isinstance(optimizer.rule, JointRule):
        refuse_offload(optimizer.configured.type, tiers, options.placement)
    tiers.plan(layout, replicated=not options.placement.states_sharded)
    values = take_values(model, comm, BufferRules(layout=layout, precision=config.precision))
    core = ShardedModel(
        model,
        layout,
        comm=comm,
        options=options,
        callbacks=callbacks,
        values=values,
        states=optimizer.states,
    )
    core.given_buffer_dtypes = values.given_dtypes
    if (layers := compute_in_fp8(model, config, comm)) is not None:
        core.fp8 = layers
        core.until_closed(layers)
    compile_units(core, config.compile)
    serve(core)
    return_free_memory()  # held by the model's own tensors before
    return core


def compile_units(core: ShardedModel, settings: CompileConfig) -> None:
    """Compile the forward of the units' modules until the model is closed; nothing where `compile` is off."""
    if settings.enabled:
        core.compiled = CompiledUnits(unit_modules(core.model, core.layout), settings)
        core.until_closed(core.compiled)
        core.updates.replicas.compiles_units = True


def _options(
    config: EngineConfig,
    comm: Comm,
    tier: OffloadedParams | None,
    spill_store: SpillStore | None,
    sums: HostSums | None,
    *,
    just_in_time: bool,
) -> CoreOptions:
    """Return the options of the sharding that a configuration means."""
    zero = config.zero
    wire = config.precision.reduce_dtype
    # Stages 0 and 1 send their sums, the others the gradients of autograd.
    source = config.precision.compute_dtype if zero.stage >= 2 else config.precision.grad_accum_dtype
    is_cast = DTYPE_BYTES[wire] <= DTYPE_BYTES[source] and wire != source
    plus = _plus(config)
    spills_weights = tier is not None and tier.may_spill
    placement = Placement.of_stage(zero.stage, world_size=comm.world_size, has_tier=tier is not None)
    if sums is not None and comm.world_size == 1:  # whose gradients leave after each pass, as at stage 2
        placement, is_cast = replace(placement, grads_sharded=True, states_sharded=True), False
    return CoreOptions(
        placement=replace(
            placement,
            sums_own_part=placement.states_sharded and keeps_own_gradients(config),
            may_share=not (plus.changes_weights or spills_weights),
            splits_masters=config.precision.store_param_remainders,
            bf16_masters=config.precision.bf16_masters,
            bf16_states=config.precision.bf16_states,
        ),
        plus=plus,
        tier=tier,
        staging=make_staging(config, comm),
        spill_store=spill_store,
        make_moved=None if sums is None else sums.make,
        just_in_time=just_in_time,
        live=LiveLimits(
            prefetch_numel=zero.prefetch_bucket_size,
            max_live_numel=zero.max_live_parameters,
            max_reuse_numel=zero.max_reuse_distance,
        ),
        wire_dtype=wire if is_cast else None,
        overlap=zero.overlap_comm,
        reduce_bucket_numel=zero.reduce_bucket_size,
        publish_numel=zero.allgather_bucket_size,
        stays_in_flight=_stays_in_flight(config, comm),
        predivision=config.precision.gradient_predivision,
        averages=config.precision.gradient_reduce_op == "mean",
    )


def _stays_in_flight(config: EngineConfig, comm: Comm) -> bool:
    """Return whether gathers of updated weights run on while the next forward pass begins: beside a device's
    computation always, beside a processor's where stages 1 and 2 are asked for overlap. Memory that ranks
    share needs no gathers."""
    zero = config.zero
    return comm.device.type == "cuda" or (
        zero.stage in (1, 2) and zero.overlap_comm and not comm.shares_memory
    )


def _plus(config: EngineConfig) -> ZeroPlusPlus:
    """Return the ZeRO++ settings that have an effect at the stage."""
    zero, ranks = config.zero, config.zero.zero_hpz_partition_size
    if zero.stage < 2 or config.world_size == 1:
        return ZeroPlusPlus()
    return ZeroPlusPlus(
        # All ranks together hold every unit once anyway.
        hpz_ranks=ranks if zero.stage == 3 and ranks < config.world_size else 1,
        quantized_weights=zero.stage == 3 and zero.zero_quantized_weights,
        quantized_gradients=zero.zero_quantized_gradients,
    )


def _check_agreement(layout: ModelLayout, comm: Comm) -> None:
    """Raise LayoutError unless all ranks built the same model: collectives of different sizes would hang."""
    rows = comm.gather_record([float(int(layout.fingerprint()[:13], 16))])  # 52 bits, exact in float64
    mismatched = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if mismatched:
        raise LayoutError(
            f"ranks {mismatched} built another model than rank 0 (names, shapes, dtypes or requires_grad "
            "differ); build it from the same configuration on every rank"
        )


def build_loader(
    data: Dataset[Any] | None, config: EngineConfig, comm: Comm, collate_fn: Callable[[list[Any]], Any] | None
) -> EpochLoader | None:
    """Return micro-batches of this rank's part of a data set (see `make_loader`); None without a data set."""
    if data is None:
        return None
    return make_loader(
        data,
        rank=comm.rank,
        world_size=comm.world_size,
        micro_batch_size=config.batch.micro_batch_size,
        drop_last=config.dataloader_drop_last,
        collate_fn=collate_fn,
    )
