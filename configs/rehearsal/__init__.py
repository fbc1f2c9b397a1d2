"""Shrinking a recipe and its models for rehearsal."""
