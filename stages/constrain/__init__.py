"""Prompts → prompts with verifiable constraints."""
