"""What a checkpoint is on the disk: names, manifest, digests and the places of tensors in shard files."""
