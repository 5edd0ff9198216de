"""`make demo`: the main job from an empty cluster to a finished training, with a killed rank on the way.

Every number that it prints is read from the cluster.
"""
