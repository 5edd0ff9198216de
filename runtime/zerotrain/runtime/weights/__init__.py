"""Weights from safetensors files, read by byte range: each rank reads only the bytes of its own part."""

from zerotrain.runtime.weights.errors import WeightsError
from zerotrain.runtime.weights.files import WeightFiles
from zerotrain.runtime.weights.load import LoadedWeights, load_weights

__all__ = ["LoadedWeights", "WeightFiles", "WeightsError", "load_weights"]
