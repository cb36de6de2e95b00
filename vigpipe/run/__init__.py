"""Describe a run: its facts, a rank's state, its batches, evaluation, record, and when it stops."""
