"""Products of linear layers in FP8 (`fp8` of the configuration): arithmetic, and the layers that use it."""
