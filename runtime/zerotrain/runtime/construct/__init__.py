"""Models that no rank could hold: built without memory, and given their values piece by piece.

    recorder  builds on the meta device and records what the constructors do
    log       replays the record for one tensor at a time
    context   `init_context`, and which log or file holds the values of which parameter
    expressions  values that are computed when they are read, interval by interval
    unread    tensors of expressions, for a library that converts what it loads
    pending   parameters whose values are read when something uses them
    whole     whole values of pending parameters for a block of a script
    values    gives `initialize` the values of each unit: replayed, read from files, or the model's own

`zerotrain.runtime.weights` binds files to parameters; `setup` and `zero.unit` use the values.
"""
