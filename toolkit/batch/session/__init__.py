"""Sessions: allocations with a name."""
