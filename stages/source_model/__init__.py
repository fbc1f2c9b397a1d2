"""A model from outside → policy."""
