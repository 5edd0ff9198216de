"""Duration of a step and cost of tokens, from the formulas' bytes and given or measured rates.

It is a model of bottlenecks: each phase takes as long as the slowest of the parts that overlap in it. It
shows which rate bounds a job and how far two configurations are apart. It does not model kernels, stragglers
and input pipelines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerotrain.contract.memory import MemoryInputs, step_traffic
from zerotrain.contract.memory.inputs import moved_gradients, offloaded, share
from zerotrain.contract.memory.moved import updates_just_in_time

from .demand import Demand, Workload
from .flops import ModelFlops
from .machines import GB, Rates
from .shape import ModelShape

SECONDS_PER_HOUR = 3600.0
BILLION = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One operation that a phase waits for."""

    phase: str
    what: str
    seconds: float
    amount: str
    """Amount of data or work, as text."""
    is_hidden: bool = False
    """Whether it runs behind a longer part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """One optimizer step of the whole job."""

    parts: tuple[Part, ...]
    seconds: float
    tokens: int
    """Tokens of all ranks in one step."""
    workers: int
    bound_by: str
    """Part with the longest duration."""
    missing: tuple[str, ...] = ()
    """Rates that are needed to count all parts; with missing rates the step takes longer than `seconds`."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def cost_per_billion(self, price_per_hour: float) -> float:
        """Return the cost of a billion tokens, if all workers together cost `price_per_hour`."""
        return price_per_hour * BILLION / self.tokens_per_second / SECONDS_PER_HOUR


def flops_per_token(shape: ModelShape) -> float:
    """Return the FLOPs of one forward pass: two per weight in matrix products, and causal attention."""
    return flops_of(shape).forward(shape.context)


def flops_of(shape: ModelShape) -> ModelFlops:
    """Return what the FLOPs of a model depend on. With adapters, they are all that is trained."""
    width = shape.layers * shape.heads * shape.head_dim
    if shape.adapters is None:
        return ModelFlops(trained=shape.matmul_parameters, attention_width=width)
    adapters = sum(sum(module.parameters) for module in shape.adapters.modules(shape))
    return ModelFlops(trained=adapters, frozen=shape.matmul_parameters, attention_width=width)


def pace(demand: Demand, rates: Rates) -> Pace | None:
    """Return the time of a step; None if no rate is known that any part of it needs."""
    clock = _Clock(demand, rates)
    forward = clock.phase("forward", clock.one_pass("forward"))
    overlaps = demand.workload.config.zero.overlap_comm
    backward = clock.phase("backward", clock.one_pass("backward"), overlaps=overlaps)
    update = clock.phase("optimizer", clock.update())
    gather = clock.phase("gather", [clock.network("gather")])
    together = clock.at_once(forward, update) if clock.is_just_in_time else forward + update
    if not clock.parts:
        return None
    seen = [part for part in clock.parts if not part.is_hidden]
    slowest = max(seen, key=lambda part: part.seconds)
    batch = demand.workload.config.batch
    return Pace(
        parts=tuple(clock.parts),
        seconds=backward + gather + together,
        tokens=batch.train_batch_size * demand.workload.shape.context,
        workers=demand.workload.workers,
        bound_by=f"{slowest.what} in {slowest.phase}",
        missing=tuple(dict.fromkeys(clock.missing)),
    )


class _Clock:
    """Converter of amounts into seconds, which records the parts and the missing rates."""

    def __init__(self, demand: Demand, rates: Rates) -> None:
        self.rates = rates
        self.workload: Workload = demand.workload
        self.inputs: MemoryInputs = demand.formulas.inputs
        self.traffic = step_traffic(self.inputs)
        self.recomputes = self.workload.config.activation_checkpointing.configured
        self.parts: list[Part] = []
        self.missing: list[str] = []

    @property
    def is_just_in_time(self) -> bool:
        block = self.workload.config.zero.offload_optimizer
        return updates_just_in_time(
            None if block is None else block.just_in_time,
            tier="none" if block is None else block.device,
            stage=self.inputs.stage,
            world_size=self.inputs.world_size,
            on_cuda=not self.workload.on_host,
        )

    def phase(self, name: str, timed: list[tuple[str, float, str] | None], *, overlaps: bool = True) -> float:
        """Return the seconds of a phase whose parts overlap or follow each other; mark hidden parts."""
        known = [item for item in timed if item is not None and item[1] > 0]
        longest = max((seconds for _, seconds, _ in known), default=0.0)
        found = False
        for what, seconds, amount in known:
            is_longest = seconds == longest and not found
            found = found or is_longest
            self.parts.append(
                Part(
                    phase=name,
                    what=what,
                    seconds=seconds,
                    amount=amount,
                    is_hidden=overlaps and not is_longest,
                )
            )
        return longest if overlaps else sum(seconds for _, seconds, _ in known)

    def at_once(self, forward: float, update: float) -> float:
        """Return the seconds of forward and just-in-time update, of which the longer one counts.

        A unit is updated before the next forward needs it. If both wait for the drive, the drive's whole time
        counts.
        """
        both = [part for part in self.parts if part.phase in ("forward", "optimizer")]
        drive = sum(part.seconds for part in both if part.what == "drive")
        longest = max(forward, update, drive)
        hidden = "optimizer" if update <= forward else "forward"
        for index, part in enumerate(self.parts):
            if part in both and drive == longest:
                self.parts[index] = replace(part, is_hidden=part.what != "drive")
            elif part.phase == hidden:
                self.parts[index] = replace(part, is_hidden=True)
        return longest

    def one_pass(self, phase: str) -> list[tuple[str, float, str] | None]:
        """Return the times of what forward or backward waits for."""
        return [
            self.compute(phase),
            self.network(phase),
            self.transfers(phase),
            self.spilled_parameters(),
        ]

    def compute(self, phase: str) -> tuple[str, float, str] | None:
        """Return the time of a pass's products. Backward computes forward again where it recomputes."""
        batch, shape = self.workload.config.batch, self.workload.shape
        tokens = batch.micro_batch_size * batch.gradient_accumulation_steps * shape.context
        model = flops_of(shape)
        forward = model.forward(shape.context)
        backward = model.training(shape.context) - (0.0 if self.recomputes else forward)
        flops = tokens * (forward if phase == "forward" else backward)
        return self._timed("compute", flops / 1e12, self.rates.tflops, "tflops", f"{flops / 1e12:.4g} TFLOP")

    def network(self, phase: str) -> tuple[str, float, str] | None:
        """Return the time of a phase's network payload.

        A ring sends (N - 1) / N of the payload; between workers it goes over one worker's network.
        """
        ranks, workers = self.inputs.world_size, self.workload.workers
        phases = self.traffic.phases
        by_phase = {"forward": phases.forward_bytes, "backward": phases.backward_bytes}
        payload = by_phase.get(phase, phases.step_bytes)
        if ranks == 1 or payload == 0:
            return None
        far_part = self.traffic.cross_node_bytes / max(1, self.traffic.network_bytes)
        near = payload * (ranks - 1) / ranks
        if workers == 1:
            if self.inputs.shares_memory:
                return None  # nothing is sent: ranks read it in place
            return self._moved("peers", near, self.rates.peer, "peer")
        far = payload * far_part * (workers - 1) / workers
        outside = self._moved("network", far, self.rates.network, "network")
        inside = self._moved("peers", near, self.rates.peer, "peer") if self._has_peers else None
        known = [item for item in (outside, inside) if item is not None]
        return max(known, key=lambda item: item[1], default=None)

    @property
    def _has_peers(self) -> bool:
        return self.workload.ranks_per_worker > 1 and self.rates.peer is not None

    def transfers(self, phase: str) -> tuple[str, float, str] | None:
        """Return the time of a pass's transfers: offloaded parameters come up, half of them in each pass, and
        sums of gradients go down and come up again in backward, both ways at the same time."""
        if self.workload.on_host:
            return None
        sums_up, sums_down = self._sums if phase == "backward" else (0, 0)
        params = 0 if self.inputs.param_tier == "gpu" else (self.traffic.pcie_up_bytes - self._sums[0]) / 2
        return self._moved("PCIe", max(params + sums_up, sums_down), self.rates.pcie, "pcie")

    @property
    def _sums(self) -> tuple[int, int]:
        """Bytes of gradients that backward passes bring (up, down), summed in host memory."""
        one_pass = self.inputs.grad_bytes * sum(moved_gradients(self.inputs))
        return one_pass * (self.inputs.micro_steps - 1), one_pass * self.inputs.micro_steps

    def spilled_parameters(self) -> tuple[str, float, str] | None:
        """Return the time to read parameters from the drive; forward and backward take half each."""
        num_bytes = self.workload.ranks_per_worker * self.traffic.nvme_pass_bytes / 2
        return self._moved("drive", num_bytes, self.rates.nvme, "nvme")

    def update(self) -> list[tuple[str, float, str] | None]:
        """Return the times of the update's reads and writes at the location of the states.

        The ranks of a worker count together.
        """
        inputs, ranks = self.inputs, self.workload.ranks_per_worker
        owners = inputs.world_size if inputs.stage >= 1 else 1
        numel = share(inputs.trainable_numel, owners)
        moved = sum(offloaded(inputs).states)
        # Gradient read, states read and written, weight written.
        width = inputs.grad_bytes + 2 * inputs.optimizer_bytes + inputs.compute_bytes
        here, away = width * (numel - moved), ranks * width * moved
        if self.workload.on_host:
            found = [self._moved("host memory", ranks * here + away, self.rates.host, "host")]
        else:
            found = [self._moved("device memory", here, self.rates.device, "device")]
            found.append(self._moved("host memory", away, self.rates.host, "host"))
            sums_up, sums_down = self._sums
            up = 0 if inputs.param_tier != "gpu" else self.traffic.pcie_up_bytes - sums_up
            crossing = max(up, self.traffic.pcie_down_bytes - sums_down)
            found.append(self._moved("PCIe", crossing, self.rates.pcie, "pcie"))
        spilled = self.traffic.nvme_bytes - self.traffic.nvme_pass_bytes
        found.append(self._moved("drive", ranks * spilled, self.rates.nvme, "nvme"))
        return found

    def _moved(
        self, what: str, num_bytes: float, rate: float | None, name: str
    ) -> tuple[str, float, str] | None:
        return self._timed(what, num_bytes / GB, rate, name, f"{num_bytes / GB:.4g} GB")

    def _timed(
        self, what: str, amount: float, rate: float | None, name: str, text: str
    ) -> tuple[str, float, str] | None:
        if amount <= 0:
            return None
        if rate is None:
            self.missing.append(name)
            return None
        return what, amount / rate, text
