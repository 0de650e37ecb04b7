"""Loading: which boxes of which files a rank needs, read into place and verified."""
