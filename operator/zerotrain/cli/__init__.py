"""The `zerotrain` command: one file per command, registered in `main`. Only rank processes import torch."""
