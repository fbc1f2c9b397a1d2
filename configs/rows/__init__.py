"""Configs of rows: where they come from, which are kept, what is expected of them, what decontamination counts as a copy."""
