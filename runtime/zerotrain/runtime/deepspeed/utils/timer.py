"""`deepspeed.utils.timer`: stop watches by name."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.facade.instruments import Timers as SynchronizedWallClockTimer

__all__ = ["SynchronizedWallClockTimer"]

__getattr__ = attributes_of(__name__)
