"""Recipes from configs of other trainers: `pedigree import`."""
