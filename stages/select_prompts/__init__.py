"""Prompts + judgments → prompts of the wanted difficulty."""
