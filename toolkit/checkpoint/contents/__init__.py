"""What a checkpoint holds, read tensor by tensor: tree, norms, differences. Without torch."""
