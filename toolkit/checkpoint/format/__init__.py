"""The file format of checkpoints: file names, manifest, digests, and the offsets of tensors in shard files."""
