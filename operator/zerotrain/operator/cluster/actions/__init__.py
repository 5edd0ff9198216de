"""Execution of the actions at the API server and the workers, with one module per concern."""
