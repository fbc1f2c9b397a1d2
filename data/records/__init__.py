"""Rows exchanged between stages, stored in columns."""
