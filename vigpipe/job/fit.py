"""Find what each part of a size costs, from measurements of several sizes."""

from collections.abc import Sequence

import numpy as np


def fit_costs(
    sizes: Sequence[Sequence[float]], costs: Sequence[float], *, constant: bool = True
) -> tuple[float, ...]:
    """Fit cost = a · size + constant by least squares, with no number below zero.

    Each row of `sizes`, (m, k), describes one thing that was measured, such as by its numbers of
    nodes and of edges; `costs`, (m,), says what each took; m > 0. The k numbers a are returned, and
    then the constant if there is one.
    """
    from scipy.optimize import nnls  # 0.2 s, which few runs need

    columns = np.array(sizes, dtype=float)
    if constant:
        columns = np.column_stack((columns, np.ones(len(sizes))))
    scales = np.maximum(columns.max(axis=0), 1)
    found = nnls(columns / scales, np.array(costs, dtype=float))[0] / scales
    return tuple(found.tolist())
