"""`zerotrain explain`: what an exit code, an alert, a condition, a metric or a configuration key means.

`commands` registers; `lookup` finds a word among `alerts`, `reasons`, exit codes, metrics and keys; `tables`
prints the contract's tables.
"""
