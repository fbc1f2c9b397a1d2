"""One recipe, run: every stage is made current, independent ones side by side."""
