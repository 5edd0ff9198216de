"""Named random states of the device, for models that a program divides over ranks: dropout in divided parts
draws other numbers on each rank of a model-parallel group, dropout elsewhere the same.

Megatron's models draw them within `get_cuda_rng_tracker().fork()`. A recomputation must draw the same numbers
again, so `checkpoint_activations` restores these states for it, as torch does the device's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import noop_context_fn

from zerotrain.runtime.activation.settings import checkpointing_is_configured, current

MODEL_PARALLEL = "model-parallel-rng"
_OFFSET = 2718
"""Distance, as in Megatron, of the seed of divided parts from that of the others."""


class RandomStates:
    """States by name; a block draws from one of them within `fork`."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the present states, which are never written."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Use the states of `get_states` from now on."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state of a seed. Raises ValueError for a name or a seed that is there already."""
        if name in self._states or seed in self._seeds:
            raise ValueError(
                f"random state {name!r} of seed {seed} is added already, or its seed under another name; "
                "call reset() before states are made anew"
            )
        before = _get_state()
        _seed(seed)
        self._states[name] = _get_state()
        self._seeds.add(seed)
        _set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the named state within the context. Raises ValueError for an unknown name."""
        if name not in self._states:
            raise ValueError(
                f"random state {name!r} is not added; call model_parallel_cuda_manual_seed(seed) first"
            )
        before = _get_state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state()
            _set_state(before)


class _Repeated:
    """Context for recomputations, of which a retained graph has several: each begins with the same states."""

    def __init__(self, states: Mapping[str, torch.Tensor]) -> None:
        self._states = states
        self._before: list[dict[str, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._before.append(_tracker.get_states())
        _tracker.set_states(self._states)

    def __exit__(self, *_: object) -> None:
        _tracker.set_states(self._before.pop())


_tracker = RandomStates()


def get_cuda_rng_tracker() -> RandomStates:
    """Return the states of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device: the same on all ranks of the model-parallel group, and another one on each of them
    within `get_cuda_rng_tracker().fork()`.

    Raises RuntimeError before `configure_checkpointing`, whose `mpu_` tells the group.
    """
    if not checkpointing_is_configured():
        raise RuntimeError(
            "the ranks of the model-parallel group are not known yet; call checkpointing.configure(mpu) first"
        )
    parallel = current()[0].parallel
    _tracker.reset()
    _seed(seed)
    _tracker.add(MODEL_PARALLEL, seed + _OFFSET + (0 if parallel is None else parallel.rank))


def contexts() -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """Return `context_fn` of torch's checkpoint, which makes the contexts for a forward pass that begins now
    and for its recomputation."""
    states = _tracker.get_states()
    if not states:
        return noop_context_fn
    return lambda: (nullcontext(), _Repeated(states))


def _get_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _seed(seed: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)
