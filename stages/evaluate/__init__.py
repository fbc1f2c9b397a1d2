"""Policies + suites → scores."""
