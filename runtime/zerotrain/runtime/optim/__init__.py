"""Element-wise optimizers on flat shards, parameter groups and learning-rate schedules."""
