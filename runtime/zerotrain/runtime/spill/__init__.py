"""Encrypted scratch space on local drives for optimizer states and parameters moved out of memory."""
