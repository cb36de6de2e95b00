"""Predict steps and search the best plan from measured costs; plain Python, without torch."""
