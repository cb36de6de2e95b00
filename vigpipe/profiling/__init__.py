"""Measure what the pieces of a model cost on this machine."""
