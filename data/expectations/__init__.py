"""Validation of rows before a stage reads them."""
