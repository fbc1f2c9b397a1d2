"""The recipe language: recipe files as graphs of stages, execution profiles, compilation to DVC."""
