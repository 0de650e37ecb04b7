"""Saving: who stores what, the shard files, and what makes a checkpoint of them."""
