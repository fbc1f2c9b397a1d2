"""What a user writes: typed recipes, execution profiles, and their compilation to a DVC graph. Imports nothing of ours."""
