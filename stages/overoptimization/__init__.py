"""Judgments → how much of a proxy's reward is real."""
