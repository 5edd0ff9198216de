"""Storage of optimizer states and parameters outside of the device, and the update that goes with it."""
