"""Prompts → new prompts, written by a language model."""
