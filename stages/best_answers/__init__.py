"""Judgments → conversations with the best answers."""
