"""Train Vision GNNs across pipeline stages and data-parallel replicas."""

__version__ = "0.1.0"
