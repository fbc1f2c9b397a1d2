"""Configs of answers: sampling, rating, comparison, and selection as training data."""
