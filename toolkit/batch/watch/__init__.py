"""How far runs are, again and again until they end."""
