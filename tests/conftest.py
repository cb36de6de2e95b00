"""Settings of every test."""

import os

# Small tensors on few cores: more threads only wait for each other. Commands inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
