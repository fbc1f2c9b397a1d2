"""Policy + conversations → policy."""
