"""The built-in trainer: `python -m zerotrain.runtime.train`, one process per rank, started by the launcher.

It reads the launch environment, the DeepSpeed-style configuration and the job's training part. It trains,
reports, writes checkpoints, stops with all ranks at the same step, and ends with a code of
`contract.exit_codes`.
"""
