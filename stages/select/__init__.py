"""Candidates + scores → the candidate with the highest development score."""
