"""Models of the built-in trainer: the byte-level GPT, and models of the user's own factory."""

from zerotrain.runtime.models.factory import BuiltModel, ModelError, build_model
from zerotrain.runtime.models.gpt import Gpt

__all__ = ["BuiltModel", "Gpt", "ModelError", "build_model"]
