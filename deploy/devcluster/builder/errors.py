"""The one error that the builder shows to a person without a traceback."""


class BuildError(Exception):
    """Something that the person at the keyboard can act on; the text names the way out."""
