"""Analyse the recorded times: where the time of a step goes, and why ranks wait."""
