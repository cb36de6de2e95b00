"""Random clustering: each node draws its part."""

import numpy as np


def uniform_parts(num_nodes: int, num_parts: int, draws: np.random.Generator) -> np.ndarray:
    """Draw the part of each node uniformly, so that the parts differ in size by chance.

    Two nodes share a part with probability 1 / k: that share of the edges is kept.

    Args:
        num_nodes: n.
        num_parts: k.
        draws: the source of random numbers.

    Returns:
        (n,) int64; a part may be empty.
    """
    return draws.integers(num_parts, size=num_nodes)
