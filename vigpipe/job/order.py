"""The order in which an epoch visits its images, or the parts of its graph."""

import numpy as np


def epoch_order(seed: int, epoch: int, num: int) -> np.ndarray:
    """Draw the order, (n,) int64, which depends only on the arguments."""
    return np.random.default_rng([seed, epoch]).permutation(num)
