"""Installed as `toolkit.site_configs`."""
