"""To and from the files of others: safetensors, torch.save and torch.distributed.checkpoint."""
