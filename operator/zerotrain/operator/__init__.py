"""The operator: watches ZeroTrainingJobs and keeps their pods, checkpoints and status right."""
