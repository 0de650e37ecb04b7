"""After a run: what it used of what it asked for, and which flags to change."""
