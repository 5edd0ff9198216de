"""The launcher: PID 1 of a worker container, torch-free.

    python -m zerotrain.runtime.launch [--] [per-rank command ...]      (no command: the built-in trainer)

It waits until the name of rank 0's pod resolves, starts one process per local rank, forwards signals, decides
the exit code of the container, writes the termination message and serves the pod's HTTP:

    main > supervisor, channel_server, http_server > ranks, stacks > process, rank_table >
    output, container_exit
"""
