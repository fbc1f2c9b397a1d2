"""Configs of answers: who samples, rates and compares them, and which become training data."""
