"""Seccomp filters that reject system calls of this thread and its children, as a container's filter does.

The numbers are those of x86-64 and of arm64. A filter cannot be removed, so use it in a child
(`forked.in_child`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_X86 = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_setup": 206,
    "io_getevents": 208,
    "openat": 257,
    "fallocate": 285,
    "pread64": 17,
    "pwrite64": 18,
}
_ARM = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_setup": 0,
    "io_getevents": 4,
    "openat": 56,
    "fallocate": 47,
    "pread64": 67,
    "pwrite64": 68,
}
NUMBERS = _ARM if platform.machine() == "aarch64" else _X86

_LOAD, _EQUAL, _HAS_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


@dataclass(frozen=True)
class Refusal:
    """One system call that fails with `error`.

    With `argument`, it fails only where the low 32 bits of that argument have all of `bits` or equal `value`.
    """

    call: str
    error: int
    argument: int | None = None
    bits: int | None = None
    value: int | None = None


def refuse(refusals: Sequence[Refusal]) -> None:
    """Install the filter at once and for good. Raises OSError if the kernel has no filters."""
    program: list[bytes] = []
    for refusal in refusals:
        conditions: list[tuple[int, int, int]] = [(0, _EQUAL, NUMBERS[refusal.call])]
        if refusal.argument is not None:
            where = 16 + 8 * refusal.argument
            if refusal.value is not None:
                conditions.append((where, _EQUAL, refusal.value))
            bits = refusal.bits or 0
            conditions += [(where, _HAS_BITS, 1 << bit) for bit in range(32) if bits >> bit & 1]
        # Each condition is a load and a jump over the rest of this refusal if it does not hold.
        for index, (where, test, operand) in enumerate(conditions):
            left = 2 * (len(conditions) - index - 1) + 1
            program += [struct.pack("HBBI", _LOAD, 0, 0, where), struct.pack("HBBI", test, 0, left, operand)]
        program.append(struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | refusal.error))
    program.append(struct.pack("HBBI", _RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, header, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
