"""Cores of a rank on a GPU: those of the NUMA node to which the GPU is attached.

The update of offloaded states runs on the rank's cores and reads memory that the GPU copies from and to.
Ranks that run on another socket send all of it over the link between sockets.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

SYS = Path("/sys")


def bind_to_node_of(device: torch.device) -> None:
    """Restrict all threads of this process to those of its cores that are near the CUDA device.

    Nothing changes where the node is not known, as on most virtual machines, or has none of the cores that
    the process may use. Memory follows its threads: Linux takes a page from the node of the core that touches
    it first. (A policy for memory needs a capability that workers do not have.)
    """
    near = cores_near(address_of(torch.cuda.get_device_properties(device)))
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended
            usable = os.sched_getaffinity(int(thread))
            if usable & near and not usable <= near:
                os.sched_setaffinity(int(thread), usable & near)


def address_of(properties: Any) -> str:
    """Return the PCI address of a GPU as the kernel writes it; its function is always 0."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def cores_near(address: str) -> set[int]:
    """Return the cores of the node to which a PCI device is attached; empty if that is not known."""
    with suppress(OSError, ValueError):
        node = int((SYS / "bus/pci/devices" / address / "numa_node").read_text())
        if node >= 0:
            return _cores_in((SYS / f"devices/system/node/node{node}/cpulist").read_text())
    return set()


def _cores_in(text: str) -> set[int]:
    """Return the cores of a list such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
