"""Judgments → preferences."""
