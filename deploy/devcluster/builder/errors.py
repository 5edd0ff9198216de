"""The one error that the builder shows without a traceback."""


class BuildError(Exception):
    """An error that the user can act on; the message names the remedy."""
