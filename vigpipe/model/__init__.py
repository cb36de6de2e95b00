"""Vision GNNs in plain PyTorch; nothing here knows of ranks."""
