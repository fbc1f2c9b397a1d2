"""Rows → those whose answers score best."""
