"""`deepspeed.runtime.utils`: reports of memory use, as aliases."""

from __future__ import annotations

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.facade.memory import memory_status, see_memory_usage

__all__ = ["memory_status", "see_memory_usage"]

__getattr__ = attributes_of(__name__)
