"""Checks before a job is handed over: what can never run is refused here, with the fix, and not found in the queue."""
