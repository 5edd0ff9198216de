"""Import of the checkpoints that DeepSpeed writes at stages 1 to 3.

Its flat partitions are stored as they are, one file per rank. The manifest says where each parameter lies in
them, so nothing has to be assembled and any number of ranks can load the result. The pickled files are opened
in a separate process (`__main__`), with an unpickler that accepts only tensors and plain data.

Called by the engine's `load_checkpoint` (`spawn.readable`) and by `zerotrain checkpoint import`.
"""
