"""Typed recipes and execution profiles, and their compilation to a DVC graph. Imports no other Pedigree package."""
