"""Find what each part of a size costs, from measurements of several sizes."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls


def fit_costs(sizes: Sequence[Sequence[float]], costs: Sequence[float]) -> tuple[float, ...]:
    """Fit cost = a · size + constant by least squares, with no number below zero.

    Args:
        sizes: of what was measured, such as its numbers of nodes and of edges, (m, k); m > 0.
        costs: what each of these took, (m,).

    Returns:
        a, k numbers, and the constant.
    """
    columns = np.column_stack((np.array(sizes, dtype=float), np.ones(len(sizes))))
    scales = np.maximum(columns.max(axis=0), 1)
    found = nnls(columns / scales, np.array(costs, dtype=float))[0] / scales
    return tuple(found.tolist())
