"""The check of the engine on an NVIDIA GPU: `python3 -m tests.gpu`, with whatever Python has torch."""
