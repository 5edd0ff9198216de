"""Methods of `Engine` beside the training loop, by subject: checkpoints, inspection, DeepSpeed's names.

They are mixins over `parts.EngineParts`, so that the loop in `engine.py` stays short; each reads the parts
and calls the package that does the work.
"""
