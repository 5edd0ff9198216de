"""`zerotrain doctor`: what this machine, or a node of the cluster, would make of a job.

`command` chooses among the local checks (`drive`, `machine`, `accelerators`, `network`) and `pods`,
the same inside the cluster, in restricted pods.
"""
