"""The life of a run as a picture: what it did with its time, and what happened to it."""
