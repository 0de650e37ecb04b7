"""Installed as `toolkit.templates`."""
