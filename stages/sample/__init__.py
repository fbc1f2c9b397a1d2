"""Policies + prompts → completions."""
