"""`zerotrain doctor`: checks of this machine, or of a node of the cluster, for what a job needs.

`command` chooses between the local checks (`drive`, `machine`, `accelerators`, `network`) and `pods`, which
runs the same checks inside the cluster, in restricted pods.
"""
