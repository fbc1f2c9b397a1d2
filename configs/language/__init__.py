"""The recipe language: files to graphs of stages, execution profiles, and their compilation to DVC."""
