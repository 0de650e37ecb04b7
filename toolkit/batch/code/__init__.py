"""The code of a run: kept at submit, and repeated."""
