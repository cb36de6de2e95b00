"""Find the best cuts of a chain of blocks into consecutive stages, by dynamic programming.

A cut costs max f + max b + sum once: f and b are the seconds of a stage's forward and backward, and
once is what a stage adds once a step. Adding a stage to a cut of the first blocks can only raise
these three terms. So of all cuts of the first j blocks into p stages, a cut needs to be kept only
if no other one is at least as good in all three terms, and if it stays below the cost of a known
cut when the remaining blocks are cut as well as possible.
"""

from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Bounds = tuple[int, ...]  # 0, the first block of stage 1, ..., the number of blocks
_ROUNDING = 1 + 1e-12


class Terms(NamedTuple):
    """Seconds of every possible stage's forwards, its backwards, and what it adds once a step.

    For P stages and n blocks, each is (P, n + 1, n + 1): [p, i, j] is stage p with blocks i to
    j - 1, and infinite where that stage is not allowed. For a cut, the maxima of f and of b over
    the stages count, and the sum of `once`.
    """

    f: Array
    b: Array
    once: Array


def value(terms: Terms, bounds: Bounds) -> float:
    """Compute the cost of one cut in seconds: max f + max b + sum once."""
    stages = np.arange(len(bounds) - 1), bounds[:-1], bounds[1:]
    return float(terms.f[stages].max() + terms.b[stages].max() + terms.once[stages].sum())


def best_cuts(terms: Terms) -> list[Bounds]:
    """Find the best cut, and others that differ in the three terms, by cost; maybe none."""
    start = even_cut(terms.f + terms.b)
    if start is None:
        return []
    limit = value(terms, start) * _ROUNDING
    rest_f, rest_b = _rest(terms.f, np.maximum), _rest(terms.b, np.maximum)
    rest_once = _rest(terms.once, np.add)
    # For every cut that is kept: the number of blocks in it so far, its three terms, its bounds.
    at, f, b, once = np.zeros(1, dtype=int), np.zeros(1), np.zeros(1), np.zeros(1)
    cuts: list[Bounds] = [(0,)]
    for p in range(len(terms.f)):
        # The remaining stages raise a smaller maximum at least to `rest`, so cuts whose maxima
        # differ below that are equally good.
        new_f = np.maximum(np.maximum(f[:, None], terms.f[p, at]), rest_f[p + 1])
        new_b = np.maximum(np.maximum(b[:, None], terms.b[p, at]), rest_b[p + 1])
        new_once = once[:, None] + terms.once[p, at]
        possible = np.argwhere((new_f + new_b + new_once + rest_once[p + 1] <= limit).T)
        kept = [
            (row, end)
            for end, pairs in groupby(possible.tolist(), key=lambda pair: pair[0])
            for row in _unbeaten([row for _, row in pairs], end, new_f, new_b, new_once)
        ]
        rows, ends = np.array(kept, dtype=int).T
        cuts = [(*cuts[row], end) for row, end in kept]
        at, f, b, once = ends, new_f[rows, ends], new_b[rows, ends], new_once[rows, ends]
    return [cuts[k] for k in np.argsort(f + b + once, kind="stable")]


def even_cut(cost: Array) -> Bounds | None:
    """Find the cut with the smallest maximum cost of a stage; None if no cut is allowed."""
    rest = _rest(cost, np.maximum)
    if not np.isfinite(rest[0, 0]):
        return None
    bounds = [0]
    for p in range(len(cost)):
        bounds.append(int(np.argmin(np.maximum(cost[p, bounds[-1]], rest[p + 1]))))
    return tuple(bounds)


def _rest(cost: Array, combine: np.ufunc) -> Array:
    """Compute, at [p, i], the least cost of stages p, p + 1, ... for the blocks i, i + 1, ...."""
    num_stages, size, _ = cost.shape
    rest = np.full((num_stages + 1, size), np.inf)
    rest[-1, -1] = 0
    for p in reversed(range(num_stages)):
        rest[p] = combine(cost[p], rest[p + 1]).min(axis=1)
    return rest


def _unbeaten(rows: list[int], end: int, f: Array, b: Array, once: Array) -> list[int]:
    """Keep the cuts that no other one beats in all three terms; all end at the same block."""
    if len(rows) == 1:
        return rows  # the most frequent case
    kept: list[tuple[float, float]] = []
    chosen: list[int] = []
    columns = (column[rows, end].tolist() for column in (f, b, once))
    costs = zip(*columns, rows, strict=True)
    for _, row_b, row_once, row in sorted(costs):
        most_b, most_once = row_b * _ROUNDING, row_once * _ROUNDING
        if not any(other_b <= most_b and other <= most_once for other_b, other in kept):
            kept.append((row_b, row_once))
            chosen.append(row)
    return chosen
