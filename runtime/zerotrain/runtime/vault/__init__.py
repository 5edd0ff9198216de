"""Encrypted scratch space on local drives for optimizer states and parameters that left memory."""
