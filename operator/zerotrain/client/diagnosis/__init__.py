"""What happened to a job and what to do next, in plain words: `zerotrain describe`, and for programs.

Pure functions of the job, its events and its pods; they ask nobody.
"""

from .case import Advice
from .diagnose import Diagnosis, diagnose
from .history import Happening

__all__ = ["Advice", "Diagnosis", "Happening", "diagnose"]
