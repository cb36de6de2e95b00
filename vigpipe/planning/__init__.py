"""From measured costs of blocks to a predicted step and the best plan; plain Python, no torch."""
