"""Scripts of others in a job, unchanged: what they report, when they stop, and from what they resume.

`reporting` tells the launcher what the engine does. `trainer` and `arguments` are called where transformers
was changed by `zerotrain.compat.libraries`: they keep its checkpoints whole (`folders`, `records`), in the
job's folder (`place`). Outside of a job nothing of this happens.
"""
