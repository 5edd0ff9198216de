"""Handlers that turn events into passes: the process, the work queue, the controller, and the tasks around
them."""
