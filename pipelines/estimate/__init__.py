"""Estimate memory, tokens, time, and disk of a stage before it runs, without loading heavy libraries."""
