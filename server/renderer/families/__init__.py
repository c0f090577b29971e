"""Chat families, a module each."""
