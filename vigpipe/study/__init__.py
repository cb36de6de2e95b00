"""The experiment of the study, done again: every layout in turn, beside the published figures."""
