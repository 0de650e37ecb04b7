"""A run's folder of checkpoints: who may write, what is committed, whole, kept or removed."""
