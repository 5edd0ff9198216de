"""`make demo`: the main job from nothing to a finished training, with a kill on the way.

Every number it prints is read back from the cluster.
"""
