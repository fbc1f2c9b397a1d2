"""Cleanup: unused objects, and rows that must be forgotten."""
