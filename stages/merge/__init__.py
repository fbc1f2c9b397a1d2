"""Policies → policy, by arithmetic on their weights."""
