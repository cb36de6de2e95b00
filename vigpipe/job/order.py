"""The order in which an epoch visits its images, or the parts of its graph."""

import numpy as np


def epoch_order(seed: int, epoch: int, num: int) -> np.ndarray:
    """Draw the order in which an epoch visits n images, or the n parts of a graph.

    Returns:
        A permutation of 0 ... n - 1, (n,) int64, which depends only on the arguments.
    """
    return np.random.default_rng([seed, epoch]).permutation(num)
