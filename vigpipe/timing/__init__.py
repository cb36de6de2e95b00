"""What a run measures of itself, and the files it leaves."""
