"""`zerotrain run`: `attempts` (restarts) > `attempt` (one launcher) > `state`, `view`, `summary`."""
