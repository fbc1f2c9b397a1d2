"""Completions → judgments, by verifiers, reward models or a language model."""
