"""Parts of `Engine` beside the model: the training loop, checkpoints, inspection, DeepSpeed's names.

Each is a plain class that gets the objects it needs, and calls the package that does the work; `Engine` has
one of each, and its methods call them.
"""
