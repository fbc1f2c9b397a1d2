"""Run one recipe: make every stage current, independent stages in parallel."""
