"""All runs below RUNS."""
