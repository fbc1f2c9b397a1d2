"""Rehearsals: a recipe with made rows and tiny models, in a project of its own."""
