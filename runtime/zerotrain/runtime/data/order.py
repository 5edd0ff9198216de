"""Order of the samples: a seeded permutation of the corpus's windows for every epoch.

Samples are numbered over the whole run, independently of ranks: with any number of ranks, step s uses the
same samples, so that a run resumed on another number of ranks continues the same sequence. The permutation is
computed index by index (a Feistel network with cycle walking) and needs no table, whatever the corpus's size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_ROUNDS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Permutation:
    """A pseudo-random bijection of `range(size)`; equal for equal size and key."""

    size: int
    key: bytes

    def __call__(self, index: int) -> int:
        """Return the image of `index`."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside a permutation of {self.size}")
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        value = index
        while True:
            value = self._encrypt(value, half_bits)
            # The network permutes a power of 4 of at most 4 x size; walking its cycle ends inside the range.
            if value < self.size:
                return value

    def _encrypt(self, value: int, half_bits: int) -> int:
        mask = (1 << half_bits) - 1
        left, right = value >> half_bits, value & mask
        for number in range(_ROUNDS):
            digest = hashlib.blake2b(
                right.to_bytes(8, "little") + bytes([number]), key=self.key, digest_size=8
            ).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        return left << half_bits | right


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """Map from sample numbers to windows of the corpus."""

    num_windows: int
    seed: int

    def window(self, sample: int) -> int:
        """Return the window that sample number `sample` (0-based, over all epochs) reads."""
        epoch, index = divmod(sample, self.num_windows)
        key = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=16).digest()
        return Permutation(size=self.num_windows, key=key)(index)
