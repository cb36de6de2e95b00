"""Measure the time of a run's steps, and write the files that show it."""
