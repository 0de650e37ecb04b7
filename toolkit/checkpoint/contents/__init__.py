"""The contents of a checkpoint, read tensor by tensor without torch: tree, norms, differences."""
