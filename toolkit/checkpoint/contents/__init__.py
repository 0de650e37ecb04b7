"""Inspects the contents of checkpoints without torch, one tensor at a time: tree, norms, differences."""
