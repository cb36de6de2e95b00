"""Settings of every test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """More threads only wait for each other on small tensors; commands choose their own."""
    torch.set_num_threads(1)
