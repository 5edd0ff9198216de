"""Compilation of units by torch.compile (`compile` of the configuration): a check before, and the units."""
