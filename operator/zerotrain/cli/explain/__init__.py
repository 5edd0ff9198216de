"""`zerotrain explain`: the meaning of an exit code, alert, condition, metric or configuration key.

`commands` registers the commands. `lookup` finds a word among `alerts`, `reasons`, exit codes, metrics and
keys. `tables` prints the contract's tables.
"""
