"""What a prediction rests on: nodes, and edges of each block."""
