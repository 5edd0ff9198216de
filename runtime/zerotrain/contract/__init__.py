"""The contract of the operator and the workers: pure Python, importable without torch, kopf or a cluster.

Both sides use every module here. A name, a number or a file format that only one side needs belongs to that
side.
"""
