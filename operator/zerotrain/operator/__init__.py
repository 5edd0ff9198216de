"""Operator that watches ZeroTrainingJobs and manages their pods, checkpoints and status."""
