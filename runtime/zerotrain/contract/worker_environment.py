"""The environment of a worker: written by the operator or `zerotrain run`, read by launcher and ranks.

No other module spells the name of a variable. `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK` and
`LOCAL_RANK` are torch's `env://` names; the others are the product's. A launcher gets all of them in one
variable, as every variable of a pod costs the API server time at each write of the pod; its ranks see them
one by one. `variables` defines which names are reserved, and which of these a job may set all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from zerotrain.contract.strict_json import strict_json
from zerotrain.contract.variables import LAUNCH_VARIABLE, without_reserved

WORKER_HTTP_PORT = 8471
MASTER_PORT = 29400
TERMINATION_LOG = "/dev/termination-log"
MAX_BACKSTOP_SECONDS = 1e9
"""Upper limit of about 30 years: torch counts a timeout in milliseconds, gloo in nanoseconds."""

MAX_EXIT_MARGIN_SECONDS = 5.0
EXIT_MARGIN_SHARE = 1 / 5
"""Share of the pod's grace period that the launcher withholds from its ranks, up to the maximum.

It ends them and writes its message in that time, before the kubelet sends SIGKILL.
"""


class LaunchError(ValueError):
    """The environment is incomplete or contradicts itself (exit code BAD_LAUNCH)."""


def _env(name: str, parse: Callable[[str], Any] = str, default: Any = None, *, required: bool = False) -> Any:
    metadata = {"env": name, "parse": parse, "required": required}
    if required:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """One worker of one attempt: `world_size` ranks in all, `ranks_per_worker` of them here."""

    job: str = _env("ZEROTRAIN_JOB", required=True)
    job_uid: str = _env("ZEROTRAIN_JOB_UID", required=True)
    attempt: int = _env("ZEROTRAIN_ATTEMPT", int, required=True)
    """Number of the attempt from 1; every progress record, checkpoint folder and token carries it."""

    master_addr: str = _env("MASTER_ADDR", required=True)
    """Name that resolves to the pod of worker 0 for as long as the attempt runs."""

    master_port: int = _env("MASTER_PORT", int, MASTER_PORT)
    world_size: int = _env("WORLD_SIZE", int, required=True)
    node_rank: int = _env("NODE_RANK", int, required=True)
    """Index of this worker, 0-based; its ranks are node_rank * ranks_per_worker and following."""

    ranks_per_worker: int = _env("ZEROTRAIN_RANKS_PER_WORKER", int, 1)
    num_gpus: int | None = _env("ZEROTRAIN_GPUS", int)
    """GPUs that the pod requests; None = no pod, or none of them."""

    config_path: Path = _env("ZEROTRAIN_CONFIG", Path, required=True)
    """File with the DeepSpeed-style JSON."""

    train_spec_path: Path | None = _env("ZEROTRAIN_TRAIN_SPEC", Path)
    """File with the TrainSpec JSON; absent if the user's own command needs none."""

    checkpoint_dir: Path | None = _env("ZEROTRAIN_CHECKPOINT_DIR", Path)
    nvme_path: Path | None = _env("ZEROTRAIN_NVME_PATH", Path)
    nvme_bytes: int | None = _env("ZEROTRAIN_NVME_BYTES", int)
    """Size of the volume at `nvme_path`, which the ranks of this worker share."""

    nvme_volume: Path | None = _env("ZEROTRAIN_NVME_VOLUME", Path)
    """Mount point that must hold the whole spill, with symbolic links resolved; None = anywhere."""

    nvme_encryption: str | None = _env("ZEROTRAIN_NVME_ENCRYPTION")
    """Encryption of the spill: `AEAD` or `None` (plain bytes).

    If absent, the configuration's value applies, else AEAD.
    """

    http_port: int = _env("ZEROTRAIN_HTTP_PORT", int, WORKER_HTTP_PORT)
    """Port of the launcher's HTTP server; 0 takes a free one."""

    http_host: str | None = _env("ZEROTRAIN_HTTP_HOST")
    """Address that the launcher's HTTP server listens on; None = all, of IPv4 and IPv6."""

    token_path: Path | None = _env("ZEROTRAIN_TOKEN_FILE", Path)
    """File (0400) with the attempt's channel token; without it POST /yield is rejected."""

    grace_seconds: float = _env("ZEROTRAIN_GRACE_SECONDS", float, 120.0)
    """Time from SIGTERM to the end of the ranks: one step boundary and one checkpoint must fit."""

    rendezvous_timeout_seconds: float = _env("ZEROTRAIN_RENDEZVOUS_TIMEOUT_SECONDS", float, 300.0)
    hang_backstop_seconds: float | None = _env("ZEROTRAIN_HANG_BACKSTOP_SECONDS", float)
    """Seconds that ranks wait for each other if another component ends hangs; see CommEnv."""

    termination_log: Path | None = _env("ZEROTRAIN_TERMINATION_LOG", Path, Path(TERMINATION_LOG))
    run_dir: Path = _env("ZEROTRAIN_RUN_DIR", Path, Path("/tmp/zerotrain"))
    """Writable folder of this worker for the channel socket and stack dumps."""

    def __post_init__(self) -> None:
        _check_range("attempt", self.attempt, 1, None)
        _check_range("world_size", self.world_size, 1, None)
        _check_range("ranks_per_worker", self.ranks_per_worker, 1, self.world_size)
        if self.world_size % self.ranks_per_worker:
            raise LaunchError(
                f"WORLD_SIZE={self.world_size} is not a multiple of "
                f"ZEROTRAIN_RANKS_PER_WORKER={self.ranks_per_worker}; "
                "set WORLD_SIZE = workers x ranks per worker"
            )
        _check_range("node_rank", self.node_rank, 0, self.num_workers - 1)
        _check_encryption(self.nvme_encryption)
        _check_backstop(self.hang_backstop_seconds)

    @property
    def num_workers(self) -> int:
        return self.world_size // self.ranks_per_worker

    @property
    def ranks(self) -> range:
        """Global ranks of this worker."""
        first = self.node_rank * self.ranks_per_worker
        return range(first, first + self.ranks_per_worker)

    @property
    def exit_margin_seconds(self) -> float:
        """Seconds from the end of `grace_seconds` to SIGKILL, as withheld by `grace_of_ranks`."""
        share = EXIT_MARGIN_SHARE / (1 - EXIT_MARGIN_SHARE)
        return min(MAX_EXIT_MARGIN_SECONDS, share * self.grace_seconds)

    def to_env(self) -> dict[str, str]:
        """Return the variables of this worker, without fields that are None."""
        return _written(self)

    def to_variable(self, settings: Mapping[str, str] | None = None) -> dict[str, str]:
        """Fold every variable of this worker into LAUNCH_VARIABLE for a launcher.

        A field that is None becomes empty text. `settings` are those variables of `variables.SETTABLE` that
        the job sets.
        """
        every = {item.metadata["env"]: "" for item in fields(self)}
        text = json.dumps({**(settings or {}), **every, **self.to_env()}, separators=(",", ":"))
        # The kubelet replaces $(NAME) by another variable of the container, also in the middle of this one.
        return {LAUNCH_VARIABLE: text.replace("$", "\\u0024")}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> LaunchSpec:
        """Read the variables, folded or not.

        Raises LaunchError that names every missing or unreadable one.
        """
        environ = unfolded(environ)
        values: dict[str, Any] = {}
        problems: list[str] = []
        for item in fields(cls):
            name = item.metadata["env"]
            text = environ.get(name, "")
            if text == "":
                if item.metadata["required"]:
                    problems.append(f"{name} is not set")
                continue
            try:
                values[item.name] = item.metadata["parse"](text)
            except ValueError:
                problems.append(f"{name}={text!r} is not {_kind(item.metadata['parse'])}")
        if problems:
            raise LaunchError(
                "launch environment: "
                + "; ".join(problems)
                + "; the operator and `zerotrain run` set these, see LaunchSpec for the full list"
            )
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnv:
    """Variables that the launcher adds for one rank process."""

    rank: int = _env("RANK", int, required=True)
    local_rank: int = _env("LOCAL_RANK", int, required=True)
    local_world_size: int = _env("LOCAL_WORLD_SIZE", int, required=True)
    channel_socket: Path | None = _env("ZEROTRAIN_CHANNEL_SOCKET", Path)
    """Unix socket of the launcher; None if a script runs without one."""

    stacks_path: Path | None = _env("ZEROTRAIN_STACKS_FILE", Path)
    """File to which the rank dumps its stacks on SIGUSR1, or else SIGUSR2."""

    def to_env(self) -> dict[str, str]:
        return _written(self)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> RankEnv:
        """Read the rank's variables. Without a launcher (`RANK` unset) the result is rank 0 of 1.

        Raises LaunchError for an unreadable one.
        """
        parsed = {"rank": 0, "local_rank": 0, "local_world_size": 1} | _parsed(cls, environ)
        return cls(**parsed)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillEnv:
    """Variables of the engine's NVMe tier, set with or without a launcher."""

    job: str = _env("ZEROTRAIN_JOB", str, "")
    job_uid: str = _env("ZEROTRAIN_JOB_UID", str, "")
    nvme_path: Path | None = _env("ZEROTRAIN_NVME_PATH", Path)
    nvme_bytes: int | None = _env("ZEROTRAIN_NVME_BYTES", int)
    nvme_volume: Path | None = _env("ZEROTRAIN_NVME_VOLUME", Path)
    nvme_encryption: str | None = _env("ZEROTRAIN_NVME_ENCRYPTION")
    local_world_size: int = _env("LOCAL_WORLD_SIZE", int, 0)
    """Ranks of this host; 0 = unknown."""

    def __post_init__(self) -> None:
        _check_encryption(self.nvme_encryption)
        if self.nvme_bytes is not None and self.nvme_bytes < 1:
            raise LaunchError(f"ZEROTRAIN_NVME_BYTES must be at least 1; got {self.nvme_bytes}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> SpillEnv:
        """Read the variables, folded or not. Raises LaunchError for an unreadable one."""
        return cls(**_parsed(cls, unfolded(environ)))


@dataclass(frozen=True, kw_only=True, slots=True)
class CommEnv:
    """Settings of a rank's collectives.

    Every setting has a default and may be set by the program that starts the ranks. All ranks of a job must
    have the same values.
    """

    transport: str = _env("ZEROTRAIN_TRANSPORT", str, "auto")
    """Transport. `auto`: memory shared by the ranks of one host if a probe finds it faster.

    `shared`: shared memory wherever it works. `gloo`: never shared memory.
    """

    watchdog_seconds: float = _env("ZEROTRAIN_WATCHDOG_SECONDS", float, 600.0)
    """Seconds that a collective waits for a rank that is doing something else before it fails.

    0 leaves only the group's timeout. If the variable is not set, the value is `hang_backstop_seconds` if
    there is one.
    """

    hang_backstop_seconds: float | None = _env("ZEROTRAIN_HANG_BACKSTOP_SECONDS", float)
    """Timeout of the group if a component that sees all ranks, such as the operator, ends hangs.

    A rank that gave up earlier would be blamed although it is a victim. None = 30 minutes.
    """

    delay_seconds: float = _env("ZEROTRAIN_COLLECTIVE_DELAY_SECONDS", float, 0.0)
    """Longest random delay of every collective's start and end, for tests of overlap."""

    local_world_size: int = _env("LOCAL_WORLD_SIZE", int, 0)
    """Consecutive ranks of one node, to count traffic between nodes; 0 = all ranks are on one node."""

    num_gpus: int = _env("ZEROTRAIN_GPUS", int, 0)
    """GPUs that the worker requests; 0 = those that torch sees, or none."""

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "shared", "gloo"):
            raise LaunchError(f"ZEROTRAIN_TRANSPORT must be auto, shared or gloo; got {self.transport!r}")
        if self.watchdog_seconds < 0 or self.delay_seconds < 0:
            raise LaunchError(
                "ZEROTRAIN_WATCHDOG_SECONDS and ZEROTRAIN_COLLECTIVE_DELAY_SECONDS must be at least 0; got "
                f"{self.watchdog_seconds} and {self.delay_seconds}"
            )
        _check_backstop(self.hang_backstop_seconds)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> CommEnv:
        """Read the variables, folded or not. Raises LaunchError for an unreadable one."""
        parsed = _parsed(cls, unfolded(environ))
        if "hang_backstop_seconds" in parsed:
            parsed.setdefault("watchdog_seconds", parsed["hang_backstop_seconds"])
        return cls(**parsed)


def grace_of_ranks(pod_seconds: float) -> float:
    """Return `grace_seconds` in a pod with `pod_seconds` from SIGTERM to SIGKILL."""
    return pod_seconds - min(MAX_EXIT_MARGIN_SECONDS, EXIT_MARGIN_SHARE * pod_seconds)


def unfolded(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with the content of LAUNCH_VARIABLE instead of all reserved names.

    Without LAUNCH_VARIABLE it is returned unchanged. Raises LaunchError if the variable cannot be read.
    """
    text = environ.get(LAUNCH_VARIABLE, "")
    if not text:
        return environ
    try:
        held = strict_json(text)
    except ValueError as error:
        raise LaunchError(f"launch environment: {LAUNCH_VARIABLE} {error}") from error
    if not isinstance(held, dict) or not all(isinstance(value, str) for value in held.values()):
        raise LaunchError(f"launch environment: {LAUNCH_VARIABLE} must be a JSON object of strings")
    return {**without_reserved(environ), **{name: value for name, value in held.items() if value}}


def _parsed(
    cls: type[RankEnv] | type[CommEnv] | type[SpillEnv], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the fields whose variables are set. Raises LaunchError for an unreadable one."""
    parsed: dict[str, Any] = {}
    for item in fields(cls):
        name, parse = item.metadata["env"], item.metadata["parse"]
        text = environ.get(name, "")
        if not text:
            continue
        try:
            parsed[item.name] = parse(text)
        except ValueError as error:
            raise LaunchError(
                f"launch environment: {name}={text!r} is not {_kind(parse)}; the launcher sets it"
            ) from error
    return parsed


def _written(spec: LaunchSpec | RankEnv) -> dict[str, str]:
    values = {item.metadata["env"]: getattr(spec, item.name) for item in fields(spec)}
    return {name: str(value) for name, value in values.items() if value is not None}


def _check_range(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise LaunchError(f"{name} must be {bound}; got {value}")


def _check_encryption(value: str | None) -> None:
    if value not in (None, "AEAD", "None"):
        raise LaunchError(f"ZEROTRAIN_NVME_ENCRYPTION must be AEAD or None; got {value!r}")


def _check_backstop(value: float | None) -> None:
    if value is not None and not 0 < value <= MAX_BACKSTOP_SECONDS:
        raise LaunchError(
            f"ZEROTRAIN_HANG_BACKSTOP_SECONDS must be above 0 and at most {MAX_BACKSTOP_SECONDS:.0f}; "
            f"got {value}; leave it out for the engine's own timeouts"
        )


def _kind(parse: Callable[[str], Any]) -> str:
    return {int: "a whole number", float: "a number"}.get(parse, "a path")  # type: ignore[call-overload, no-any-return]
