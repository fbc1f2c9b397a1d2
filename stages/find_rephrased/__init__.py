"""Rows → those that set the task of no benchmark item in other words, as a language model judges."""
