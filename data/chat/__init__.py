"""Conversion of messages to token ids."""
