"""Repeat the experiment of the study: run every layout in turn, beside the published figures."""
