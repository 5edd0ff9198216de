"""`python -m zerotrain.compat SCRIPT [ARG ...]`, or `-m MODULE [ARG ...]`."""

from __future__ import annotations

import sys

from zerotrain.compat.program import main

main(sys.argv[1:])
