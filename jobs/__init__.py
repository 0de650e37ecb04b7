"""Installed as `toolkit.jobs`."""
