"""Trackers of the configuration (tensorboard, csv_monitor, wandb, comet, trackio, mlflow); rank 0 writes."""
