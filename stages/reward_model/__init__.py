"""Policy + preferences → reward model."""
