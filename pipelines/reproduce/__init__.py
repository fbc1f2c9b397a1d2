"""Rebuild an artifact from its records and compare it with the original."""
