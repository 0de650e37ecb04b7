"""Arrays whose tasks have values of their own."""
