"""Profile a model on this machine: measure what its pieces cost."""
