"""Low-rank adapters on a frozen, optionally quantised base."""
