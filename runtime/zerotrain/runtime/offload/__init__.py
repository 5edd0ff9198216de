"""Where optimizer states and parameters live when they leave the device, and the update that goes with it."""
