"""A run's folder of checkpoints: its writer, and which checkpoints are committed, complete, kept or removed."""
