"""The flat-unit ZeRO core: layout, planning, shard store, hooks and the end-of-step pipeline.

`engine.py` is the only caller; the checkpoint package reads only `layout` and `state`.
"""
