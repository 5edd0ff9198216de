"""A step over sealed chunks equals opening all, updating the parts as tensors, and sealing all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.support.chunks import BACKENDS, IDENTITY, KEY
from zerotrain.runtime import _native
from zerotrain.runtime.spill.seal import ChunkBatch, PlainSealer, Sealer, SpillIntegrityError

pytestmark = pytest.mark.unit


CHUNK_NUMEL = 16_384
NUMELS = (CHUNK_NUMEL, CHUNK_NUMEL, CHUNK_NUMEL, 2048)
NUM_STATES = {"adamw": 2, "adam": 2, "adagrad": 1, "lion": 1}
ORIGIN = 4096
"""Elements of the task before the record's first element."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The contents of a chunk, and its update rule."""

    rule: str
    master: str
    """Place of the master: a dtype in the chunk, "weight" (fp32) or "bf16 weight"; "bf16" has bf16 states."""

    @property
    def has_own_master(self) -> bool:
        return self.master in ("f32", "i16")

    @property
    def layout(self) -> str:
        parts = [self.master] if self.has_own_master else []
        return ",".join([*parts, *["bf16" if self.master == "bf16" else "f32"] * NUM_STATES[self.rule]])

    @property
    def element_bytes(self) -> int:
        return sum(4 if part == "f32" else 2 for part in self.layout.split(","))


CASES = [
    Case(rule="adamw", master="f32"),
    Case(rule="adamw", master="i16"),
    Case(rule="adam", master="f32"),
    Case(rule="adagrad", master="f32"),
    Case(rule="lion", master="i16"),
    Case(rule="adamw", master="weight"),
    Case(rule="adamw", master="bf16"),
    Case(rule="lion", master="bf16"),
    Case(rule="adagrad", master="bf16 weight"),
]


class Step:
    """Random gradient, weight and states of one record, and the task over them."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(7)
        numel = ORIGIN + sum(NUMELS)
        self.case = case
        self.grad = torch.randn(numel, generator=generator).bfloat16()
        weight = torch.randn(numel, generator=generator)
        self.weight = weight if case.master == "weight" else weight.bfloat16()
        self.parts = []
        for part in case.layout.split(","):
            values = torch.randn(numel, generator=generator).abs()
            dtype = torch.bfloat16 if part == "bf16" else torch.float32
            self.parts.append((values * 1000).short() if part == "i16" else values.to(dtype))
        if case.master == "f32":
            self.parts[0] = weight

    def task(self) -> _native.UpdateTask:
        numel = self.grad.numel()
        half = ORIGIN + CHUNK_NUMEL + 100
        segments = [
            _native.Segment(start, stop, lr=lr, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3)
            for start, stop, lr in ((0, half, 1e-2), (half, numel, 3e-3))
        ]
        return _native.UpdateTask(
            self.case.rule,
            segments,
            self.grad,
            self.weight,
            grad_scale=0.25,
            weight_is_master=not self.case.has_own_master,
            bf16_states=self.case.master == "bf16",
        )

    def reference(self) -> Step:
        """Return a copy after the step, computed with whole tensors."""
        after = Step(self.case)
        has_own = self.case.has_own_master
        master, states = (after.parts[0], after.parts[1:]) if has_own else (None, after.parts)
        cut = slice(ORIGIN, None)
        own_master = None if master is None else master[cut]
        _native.update_(after.task(), own_master, [state[cut] for state in states], start=ORIGIN)
        return after

    def chunks(self) -> torch.Tensor:
        """Return the parts in the order of the spill store."""
        pieces, start = [], ORIGIN
        for numel in NUMELS:
            pieces += [part[start : start + numel].view(torch.uint8) for part in self.parts]
            start += numel
        return torch.cat(pieces)


def _batch(sealer: Sealer, step: Step) -> ChunkBatch:
    element = step.case.element_bytes
    record = sealer.add("block.0", [numel * element for numel in NUMELS], layout=step.case.layout)
    data = step.chunks()
    return ChunkBatch(record=record, first=0, count=len(NUMELS), data=data, file_offset=0)


SEALERS = (*sorted(BACKENDS), "none")


def _sealer(name: str) -> Sealer:
    return PlainSealer(IDENTITY) if name == "none" else BACKENDS[name](IDENTITY, key=KEY)


@pytest.mark.parametrize("backend", SEALERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.master}")
def test_the_step_over_chunks_is_the_step_over_tensors(backend: str, case: Case) -> None:
    step = Step(case)
    expected = step.reference()
    assert not torch.equal(expected.chunks(), step.chunks())
    sealer = _sealer(backend)
    whole = _batch(sealer, step)
    sealer.seal(whole)
    task = step.task()
    # In two batches: the position of a tile's first element follows from the chunk's number.
    cut = 2 * CHUNK_NUMEL * case.element_bytes
    sealer.update(replace(whole, count=2, data=whole.data[:cut]), task, origin=ORIGIN)
    sealer.update(replace(whole, first=2, count=2, data=whole.data[cut:]), task, origin=ORIGIN)
    if backend != "none":
        assert (whole.data == expected.chunks()).float().mean() < 0.1
    sealer.open(whole)
    assert torch.equal(whole.data, expected.chunks())
    assert torch.equal(step.weight, expected.weight)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_chunk_that_fails_is_not_updated_and_the_others_are(backend: str) -> None:
    step = Step(CASES[1])
    expected, before = step.reference(), step.weight.clone()
    sealer = _sealer(backend)
    chunks = _batch(sealer, step)
    sealer.seal(chunks)
    size = chunks.record.chunk_bytes
    good = chunks.data[size : 2 * size].clone()
    chunks.data[size + 99] ^= 8
    with pytest.raises(SpillIntegrityError) as caught:
        sealer.update(chunks, step.task(), origin=ORIGIN)
    assert (caught.value.failed, caught.value.file_offset) == ((1,), size)
    bad = slice(ORIGIN + CHUNK_NUMEL, ORIGIN + 2 * CHUNK_NUMEL)
    assert torch.equal(step.weight[bad], before[bad])
    assert torch.equal(step.weight[: bad.start], expected.weight[: bad.start])
    assert torch.equal(step.weight[bad.stop :], expected.weight[bad.stop :])
    assert not chunks.data[size : 2 * size].any()
    # The right bytes of that chunk, read again, complete the step.
    chunks.data[size : 2 * size] = good
    sealer.update(
        replace(chunks, first=1, count=1, data=chunks.data[size : 2 * size]), step.task(), origin=ORIGIN
    )
    sealer.open(chunks)
    assert torch.equal(chunks.data, expected.chunks())
    assert torch.equal(step.weight, expected.weight)


@pytest.mark.parametrize("backend", SEALERS)
def test_chunks_that_are_not_the_tasks_are_refused_before_any_change(backend: str) -> None:
    step = Step(CASES[0])
    sealer = _sealer(backend)
    chunks = _batch(sealer, step)
    sealer.seal(chunks)
    before, weight = chunks.data.clone(), step.weight.clone()
    with pytest.raises(ValueError, match=r"hold elements .* the update has"):
        sealer.update(chunks, step.task(), origin=ORIGIN + 1)
    with pytest.raises(ValueError, match="12 bytes per element, the update 8"):
        sealer.update(chunks, Step(Case(rule="lion", master="f32")).task())
    sealer.open(chunks)
    assert torch.equal(step.weight, weight)
    assert torch.equal(chunks.data, step.chunks())
    assert backend != "none" or torch.equal(before, step.chunks())


def test_chunks_without_a_layout_cannot_be_updated() -> None:
    sealer = PlainSealer(IDENTITY)
    chunks = replace(_batch(sealer, Step(CASES[0])), record=sealer.add("block.1", [1]))
    with pytest.raises(ValueError, match="have the layout ''"):
        _ = chunks.record.has_remainder
