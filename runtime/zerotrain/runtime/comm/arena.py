"""Memory of one rank that the other ranks of its host can read: a sparse, unnamed memory file.

The file is a memfd. It has no name, so nothing is left behind however the process ends. The size of /dev/shm
does not limit it, and the cgroup is charged page by page, when a page is touched. Its size is address space
only. Used by `shared.py`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from contextlib import suppress
from functools import cache

import torch

_MAP_NORESERVE = 0x4000  # Linux; mmap has the name from Python 3.13 on
_MAP_FIXED = 0x10
_FALLOC_PUNCH_HOLE = 0x03  # keep the size, free the pages
_FILE_BIT = 61
_PRESENT_FILE = 0b101
_HUGE = 2 << 20
"""Size in bytes from which a buffer is aligned to this size and requests huge pages."""


class Arena:
    """Memory file of this rank, mapped whole. Buffers are page-aligned; new and freed ones read as zeros."""

    def __init__(self, num_bytes: int) -> None:
        """Create and map the file. Raises OSError if the system has no memfd or refuses the address space."""
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("zerotrain", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, num_bytes)
        self.pages = mmap.mmap(self.fd, num_bytes)
        self._bytes = _as_bytes(self.pages)
        self._base = self._bytes.data_ptr()
        with suppress(OSError):  # without it `has_copies` returns True
            _page_flags()  # early: a process that is undumpable later cannot open it
        self._sizes: dict[int, int] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        """Buffers in use, by offset. Kept, as a thread of torch that drops the last reference to one at the
        end of the process would need the interpreter."""

        self._holes: list[tuple[int, int]] = [(0, num_bytes)]  # (offset, bytes), by offset

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros, whose storage is its own bytes. Release it with `free`."""
        wanted = max(numel * dtype.itemsize, 1)
        align = _HUGE if wanted >= _HUGE else mmap.PAGESIZE
        offset = self._carve(-(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE, align)
        if wanted >= _HUGE:
            # Only whole huge pages, so that the buffer takes no more memory than its bytes.
            with suppress(OSError):  # the kernel has no huge pages
                self.pages.madvise(mmap.MADV_HUGEPAGE, offset, wanted // _HUGE * _HUGE)
        # A view of the whole file would be pickled and copied with all of its address space.
        buffer = torch.frombuffer(self.pages, dtype=torch.uint8, count=wanted, offset=offset)
        self._buffers[offset] = buffer
        return view_of(buffer, 0, numel, dtype)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `numel` elements at a byte offset."""
        return view_of(self._bytes, offset, numel, dtype)

    def free(self, tensor: torch.Tensor) -> None:
        """Return the memory of a tensor from `zeros` to the system."""
        offset = tensor.data_ptr() - self._base
        assert offset in self._sizes  # came from `zeros`
        size = self._sizes.pop(offset)
        del self._buffers[offset]
        self._punch(offset, size)
        self._holes.append((offset, size))
        self._holes.sort()
        merged = [self._holes[0]]
        for start, length in self._holes[1:]:
            before, taken = merged[-1]
            if before + taken == start:
                merged[-1] = (before, taken + length)
            else:
                merged.append((start, length))
        self._holes = merged

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return the byte offset of a contiguous tensor that lies in this arena, else None."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self.num_bytes else None

    def close(self) -> None:
        """Close the file. The memory lives as long as tensors refer to it, here or on other ranks."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _carve(self, size: int, align: int) -> int:
        for index, (start, length) in enumerate(self._holes):
            offset = -(-start // align) * align
            if offset + size <= start + length:
                rest = [(start, offset - start), (offset + size, start + length - offset - size)]
                self._holes[index : index + 1] = [hole for hole in rest if hole[1]]
                self._sizes[offset] = size
                return offset
        raise MemoryError(f"no {size} bytes left of the {self.num_bytes} of shared address space")

    def _punch(self, offset: int, size: int) -> None:
        if _LIBC.fallocate(self.fd, _FALLOC_PUNCH_HOLE, offset, size) != 0:
            view_of(self._bytes, offset, size, torch.uint8).zero_()


class PeerArena:
    """Memory file of another rank, mapped for reading."""

    def __init__(self, fd: int) -> None:
        """Map the file and take ownership of `fd`."""
        self.fd = fd
        self.pages = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        self._bytes = _as_bytes(self.pages)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `numel` elements at a byte offset. Writing into them kills the process."""
        return view_of(self._bytes, offset, numel, dtype)

    def close(self) -> None:
        """Close the file; views stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_in_a_row(parts: list[tuple[int, int]], part_bytes: int) -> mmap.mmap:
    """Map `(fd, offset)` parts one after the other into one private mapping; sizes and offsets are whole
    pages.

    Reads see what the owners have written last. A write copies the page, for this process alone, until
    `madvise(MADV_DONTNEED)` drops the copies. Raises OSError.
    """
    whole = mmap.mmap(
        -1, part_bytes * len(parts), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    )
    base = _as_bytes(whole).data_ptr()
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    for index, (fd, offset) in enumerate(parts):
        address = base + index * part_bytes
        found = _LIBC.mmap(address, part_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        if found != address:
            raise OSError(ctypes.get_errno(), "cannot map another rank's memory")
    return whole


def has_copies(address: int, num_bytes: int) -> bool:
    """Return whether a private mapping holds pages that this process wrote; True if the system does not
    tell."""
    try:
        raw = os.pread(_page_flags(), num_bytes // mmap.PAGESIZE * 8, address // mmap.PAGESIZE * 8)
    except OSError:
        return True
    # The upper bits: present, swapped out, (unused), of a file. A page that is untouched or of the file was
    # not written.
    kinds = (torch.frombuffer(bytearray(raw), dtype=torch.int64) >> _FILE_BIT) & 0b111
    return bool(((kinds != 0) & (kinds != _PRESENT_FILE)).any())


@cache
def _page_flags() -> int:
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


def view_of(data: torch.Tensor, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `numel` elements of `dtype` at a byte offset of a tensor of bytes."""
    return data[offset : offset + numel * dtype.itemsize].view(dtype)


def _as_bytes(pages: mmap.mmap) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "not writable": peers' memory is never written
        return torch.frombuffer(pages, dtype=torch.uint8)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return libc


_LIBC = _libc()
