"""Trackers: what shows the metrics and states of runs outside Pedigree."""
