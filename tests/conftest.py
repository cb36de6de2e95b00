"""Settings of every test."""

import torch

# Small tensors on few cores: more threads only wait for each other. Commands choose their own.
torch.set_num_threads(1)
