"""Policy + preferences → policy."""
