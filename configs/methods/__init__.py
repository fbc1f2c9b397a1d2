"""Configs of training: optimizers, losses, policy-gradient algorithms, merges."""
