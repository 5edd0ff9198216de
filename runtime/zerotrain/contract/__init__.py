"""What the operator and the workers agree on: pure Python, importable without torch, kopf or a cluster.

Every module here is used by both sides: a name, a number or a file format that only one side needs
belongs to that side.
"""
