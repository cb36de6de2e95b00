"""Vision GNNs in plain PyTorch, which train in one process and know nothing of ranks."""
