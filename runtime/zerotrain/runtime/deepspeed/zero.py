"""`deepspeed.zero`: building models without memory, and access to whole parameters, as aliases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from zerotrain.runtime.construct.context import init_context
from zerotrain.runtime.construct.whole import whole_values
from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.zero.access import full_parameters
from zerotrain.runtime.zero.running import cores, gather_for_pass, is_running

__all__ = [
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "unregister_external_parameter",
]

__getattr__ = attributes_of(__name__)


@contextmanager
def Init(
    module: nn.Module | None = None,
    *,
    config_dict_or_path: Any = None,
    config: Any = None,
    enabled: bool = True,
    **_other: Any,
) -> Iterator[None]:
    """Enter `zerotrain.runtime.init_context`. `module` and the other arguments of DeepSpeed's have no meaning
    here: `initialize` takes a model over that is already built, on the configured device and in the
    configured precision. While a model of an engine is in forward or backward it does nothing: tensors that
    are made then belong to the pass."""
    builds = enabled and module is None and not any(is_running(core) for core in cores())
    with init_context(config_dict_or_path if config is None else config, enabled=builds):
        yield


@contextmanager
def GatheredParameters(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Enter `zerotrain.runtime.full_parameters`. Before `initialize` parameters that are not read yet get
    their values, and with `modifier_rank` all ranks take those of that rank. In forward and backward the
    parameters are whole until the pass ends, without a context; writing them there (`modifier_rank`) raises
    RuntimeError. `fwd_module` has no meaning here."""
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    given = [params] if isinstance(params, nn.Parameter) else params
    found = [each for each in given if isinstance(each, nn.Parameter)]  # transformers passes absent biases
    if not enabled or (modifier_rank is None and gather_for_pass(found)):
        yield
        return
    with whole_values(found, modifier_rank), full_parameters(found, modifier_rank):
        yield


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter that another module uses in forward is gathered when it is used."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing; see `register_external_parameter`."""
