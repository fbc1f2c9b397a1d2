"""Rehearsals: run a recipe with generated rows and tiny models in a separate project."""
