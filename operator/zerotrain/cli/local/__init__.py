"""How `zerotrain run` runs: `attempts` (restarts) > `attempt` (one launcher) > `state`, `view`, `summary`."""
