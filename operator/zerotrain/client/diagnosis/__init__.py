"""Diagnosis of a job in plain words, with advice, for `zerotrain describe` and for programs.

It consists of pure functions of the job, its events and its pods; they send no requests.
"""

from .case import Advice
from .diagnose import Diagnosis, diagnose
from .history import Happening

__all__ = ["Advice", "Diagnosis", "Happening", "diagnose"]
