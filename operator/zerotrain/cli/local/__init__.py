"""`zerotrain run` and `launch`: `attempts` (restarts), `script` (none) > `stop`, `attempt` (one launcher) >
`view`."""
