"""Converts checkpoints to and from safetensors, torch.save and torch.distributed.checkpoint."""
