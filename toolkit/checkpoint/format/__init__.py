"""The files of a checkpoint: names, manifest, digests and the offsets of tensors in shard files."""
