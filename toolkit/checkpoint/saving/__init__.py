"""Saving: plans the pieces of each rank, writes the shard files, and commits the checkpoint."""
