"""Manages the `checkpoints` folder of a run: the writer lock, commits, completeness checks, retention and deletion."""
