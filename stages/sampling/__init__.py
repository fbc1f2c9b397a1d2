"""Answers from language models: vLLM and remote endpoints, and rewards of answers."""
