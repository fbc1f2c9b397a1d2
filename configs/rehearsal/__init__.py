"""How a recipe and its models are made small enough to be rehearsed."""
