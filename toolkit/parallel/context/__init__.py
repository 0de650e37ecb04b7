"""Split long sequences over the ranks of `cp`, and compute attention between their parts."""
