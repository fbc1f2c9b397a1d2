"""Rows → those that share no text with benchmark items."""
