"""The three batch sizes: any of them derives the rest, as DeepSpeed does it.

| given                       | derived                                         |
|-----------------------------|-------------------------------------------------|
| all three                   | nothing; they must multiply                     |
| train, micro                | accumulation = train / (micro * ranks)          |
| train, accumulation         | micro = train / (ranks * accumulation)          |
| micro, accumulation         | train = micro * accumulation * ranks            |
| train                       | accumulation = 1, micro = train / ranks         |
| micro                       | accumulation = 1, train = micro * ranks         |
| accumulation, or nothing    | micro = 1 (DeepSpeed refuses), train as above   |

Unlike DeepSpeed, a division that leaves a remainder is an error that names the nearest sizes that work.
"""

from __future__ import annotations

from .errors import ConfigError
from .schema import BatchConfig

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


def resolve_batch(
    *, train: int | None, micro: int | None, accumulation: int | None, world_size: int
) -> BatchConfig:
    """Return the sizes in samples by the table above; None means not given.

    Raises ConfigError on a mismatch.
    """
    if train is None:
        micro = micro or 1
        accumulation = accumulation or 1
        train = micro * accumulation * world_size
    elif micro is not None and accumulation is not None:
        _check_product(train, micro, accumulation, world_size)
    elif micro is not None:
        accumulation = _divide(train, micro * world_size, f"{MICRO} {micro} x {world_size} ranks")
    else:
        accumulation = accumulation or 1
        what = f"{ACCUMULATION} {accumulation} x {world_size} ranks"
        micro = _divide(train, accumulation * world_size, what)
    return BatchConfig(
        train_batch_size=train, micro_batch_size=micro, gradient_accumulation_steps=accumulation
    )


def _divide(train: int, divisor: int, what: str) -> int:
    quotient, remainder = divmod(train, divisor)
    if remainder or not quotient:
        below, above = quotient * divisor, (quotient + 1) * divisor
        choices = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(TRAIN, f"must be a multiple of {what} = {divisor}", train, f"Take {choices}.")
    return quotient


def _check_product(train: int, micro: int, accumulation: int, world_size: int) -> None:
    product = micro * accumulation * world_size
    if train != product:
        raise ConfigError(
            TRAIN,
            f"must be {MICRO} x {ACCUMULATION} x ranks = {micro} x {accumulation} x {world_size} = {product}",
            train,
            f"Take {product}, or leave one of the three out to have it computed.",
        )
