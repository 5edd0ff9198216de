"""`from_pretrained` of transformers under ZeRO stage 3: no process ever holds the model.

With a stage 3 configuration alive, transformers builds the model in memory and reads all files into rank 0.
Here it takes its ordinary way instead, on the meta device, and finds `UnreadTensor`s where it reads files: so
it renames, joins, cuts, ties and initialises as it always does, and what comes out of files are `pending`
parameters, of which `initialize` reads each rank's share.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zerotrain.runtime.construct.context import is_recording, logs_of, recording, replayed_origin
from zerotrain.runtime.construct.expressions import Leaf
from zerotrain.runtime.construct.log import ConstructionLog, TensorRef
from zerotrain.runtime.construct.pending import pending
from zerotrain.runtime.construct.unread import UnreadTensor
from zerotrain.runtime.weights.errors import WeightsError
from zerotrain.runtime.weights.files import WeightFiles
from zerotrain.runtime.zero.names import named_parameters
from zerotrain.runtime.zero.placeholder import owner_of

SURFACES = (
    "transformers.modeling_utils.PreTrainedModel.from_pretrained",
    "transformers.modeling_utils.PreTrainedModel._from_config",
    "transformers.modeling_utils.PreTrainedModel.resize_token_embeddings",
    "transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref",
)
"""Names that are replaced: the first four for good, and `_hf_deepspeed_config_weak_ref`, from which every
module of the library reads whether stage 3 is on, while a model is built or resized. Those with an underscore
are private: tested with transformers 5.24, where the third takes model, state dict, files, options and
expected keys."""

_is_building: ContextVar[bool] = ContextVar("is_building", default=False)


class StoredTensor(Leaf):
    """A tensor of a file."""

    def __init__(self, files: WeightFiles, name: str) -> None:
        stored = files.tensors[name]
        super().__init__(stored.shape, stored.dtype)
        self._files = files
        self._name = name

    def _read_range(self, start: int, target: torch.Tensor) -> None:
        self._files.read_into(self._name, start, target)


def take_over(modeling: ModuleType) -> None:
    """Replace `SURFACES`, given `transformers.modeling_utils`. A second call does nothing."""
    base = modeling.PreTrainedModel
    if hasattr(base._load_pretrained_model, "__wrapped__"):
        return
    settings = importlib.import_module("transformers.integrations.deepspeed")
    settings._hf_deepspeed_config_weak_ref  # noqa: B018 - raises where a version has no such name
    from_pretrained, from_config = base.from_pretrained.__func__, base._from_config.__func__
    load, resize = base._load_pretrained_model, base.resize_token_embeddings

    @functools.wraps(from_pretrained)
    def loads(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not settings.is_deepspeed_zero3_enabled() or kwargs.get("device_map") is not None:
            return from_pretrained(cls, *args, **kwargs)  # refuses a device map under stage 3
        with _without_stage_3(settings):
            return from_pretrained(cls, *args, **kwargs)

    @functools.wraps(from_config)
    def builds(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not settings.is_deepspeed_zero3_enabled() or is_recording():
            return from_config(cls, *args, **kwargs)
        with _without_stage_3(settings), recording(ConstructionLog(None)):
            model = from_config(cls, *args, **kwargs)
        postpone_recorded(model)
        return model

    @functools.wraps(load)
    def loads_later(
        model: nn.Module, state: Any, files: Sequence[str] | None, options: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not _is_building.get() or state is not None or files is None:
            return load(model, state, files, options, *args, **kwargs)
        _refuse(files, options)
        found = load(model, unread_tensors(files), None, options, *args, **kwargs)
        postpone_unread(model)
        return found

    @functools.wraps(resize)
    def resizes(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(each.is_meta or owner_of(each) is not None for each in model.parameters()):
            return resize(model, *args, **kwargs)  # made within zero.Init, or driven by an engine
        with _without_stage_3(settings):  # else a table of the same size is drawn anew
            return resize(model, *args, **kwargs)

    base.from_pretrained = classmethod(loads)
    base.resize_token_embeddings = resizes
    base._from_config = classmethod(builds)
    base._load_pretrained_model = staticmethod(loads_later)


def unread_tensors(files: Sequence[str | Path]) -> dict[str, UnreadTensor]:
    """Return the tensors of safetensors files by name; only headers are read."""
    found: dict[str, UnreadTensor] = {}
    for file in files:
        opened = WeightFiles(file)
        found |= {name: UnreadTensor(StoredTensor(opened, name)) for name in opened.tensors}
    return found


def postpone_unread(model: nn.Module) -> None:
    """Replace the parameters of a model that are unread by pending ones, and read its buffers."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        for key, parameter in parameters.items():
            if isinstance(parameter, UnreadTensor):
                if id(parameter) not in made:
                    made[id(parameter)] = _pending(parameter)
                parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if isinstance(buffer, UnreadTensor):
                module._buffers[key] = buffer.expression.whole()
                _copy_marks(buffer, module._buffers[key])


@torch.no_grad()
def postpone_recorded(model: nn.Module) -> None:
    """Replace the parameters of a recorded model by pending ones, and give other tensors their values."""
    made: dict[int, torch.Tensor] = {}
    logs = logs_of(model)
    for name, parameter in named_parameters(model):
        origin = replayed_origin(model, name, parameter, logs) if parameter.is_meta else None
        if origin is not None:
            made[id(parameter)] = pending(origin, requires_grad=parameter.requires_grad)
            vars(made[id(parameter)]).update(vars(parameter))
    for module in model.modules():
        for kept in (module._parameters, module._buffers, vars(module)):
            for key, tensor in list(kept.items()):
                if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    log = next(log for log in logs if log.knows(TensorRef.of(tensor)))
                    made[id(tensor)] = log.materialise(tensor)
                kept[key] = made[id(tensor)]  # type: ignore[assignment]


def _pending(parameter: UnreadTensor) -> nn.Parameter:
    made = pending(parameter.expression, requires_grad=parameter.requires_grad)
    _copy_marks(parameter, made)
    return made


def _copy_marks(source: torch.Tensor, target: Any) -> None:
    """Copy the attributes that transformers put on a tensor, such as that it is initialised."""
    marks: Mapping[str, Any] = {
        key: value for key, value in vars(source).items() if key not in ("expression", "_is_param")
    }
    vars(target).update(marks)


def _refuse(files: Sequence[str], options: Any) -> None:
    """Raise WeightsError for folders that cannot be read by ranges."""
    if options.hf_quantizer is not None:
        raise WeightsError(
            f"{files[0]}: quantized weights cannot be partitioned by ZeRO stage 3; load weights in bf16 or "
            "fp32, use stage 2, or make the model before the TrainingArguments or HfDeepSpeedConfig of stage "
            "3, as a model that no engine drives"
        )
    for file in files:
        if not str(file).endswith(".safetensors"):
            WeightFiles(file)  # says why, and how to convert it
            raise WeightsError(f"{file}: under ZeRO stage 3 weights are read from .safetensors files alone")


@contextmanager
def _without_stage_3(settings: Any) -> Iterator[None]:
    """Let the library build a model as if there were no configuration of stage 3."""
    token, alive = _is_building.set(True), settings._hf_deepspeed_config_weak_ref
    settings._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        settings._hf_deepspeed_config_weak_ref = alive
        _is_building.reset(token)
