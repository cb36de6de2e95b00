"""The best cuts of a chain of blocks into consecutive stages, by dynamic programming.

A cut costs max f + max b + the sum of what every stage adds once. Adding a stage to a cut of the
first blocks can only raise all three, so of all cuts of the first j blocks into p stages only those
that no other one beats in all three need be kept; and of those only the ones that, with the best
that the rest could do, stay below a cut already known.
"""

from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Bounds = tuple[int, ...]  # 0, the first block of stage 1, ..., the number of blocks
_ROUNDING = 1 + 1e-12


class Terms(NamedTuple):
    """What every possible stage costs; all (P, n + 1, n + 1), infinite where it may not be.

    Attributes:
        f: [p, i, j] of stage p with blocks i to j - 1; the dearest stage counts.
        b: likewise.
        once: likewise, but every stage counts.
    """

    f: Array
    b: Array
    once: Array


def value(terms: Terms, bounds: Bounds) -> float:
    """Of one cut."""
    own = np.arange(len(bounds) - 1), bounds[:-1], bounds[1:]
    return float(terms.f[own].max() + terms.b[own].max() + terms.once[own].sum())


def best_cuts(terms: Terms) -> list[Bounds]:
    """The best cut, then others of different (max f, max b, sum); none where none may be."""
    start = even_cut(terms.f + terms.b)
    if start is None:
        return []
    limit = value(terms, start) * _ROUNDING
    rest_f, rest_b = _rest(terms.f, np.maximum), _rest(terms.b, np.maximum)
    rest_once = _rest(terms.once, np.add)
    # Of every cut kept: how many blocks it has so far, its three costs, its bounds.
    at, f, b, once = np.zeros(1, dtype=int), np.zeros(1), np.zeros(1), np.zeros(1)
    cuts: list[Bounds] = [(0,)]
    for p in range(len(terms.f)):
        # What is to come raises a smaller maximum anyway: cuts that differ below are as good.
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
    """The cut whose dearest stage is the cheapest possible; None where none may be."""
    rest = _rest(cost, np.maximum)
    if not np.isfinite(rest[0, 0]):
        return None
    bounds = [0]
    for p in range(len(cost)):
        bounds.append(int(np.argmin(np.maximum(cost[p, bounds[-1]], rest[p + 1]))))
    return tuple(bounds)


def _rest(cost: Array, combine: np.ufunc) -> Array:
    """[p, i]: the least that stages p, p + 1, ... can make of blocks i, i + 1, ... together."""
    num_stages, size, _ = cost.shape
    rest = np.full((num_stages + 1, size), np.inf)
    rest[-1, -1] = 0
    for p in reversed(range(num_stages)):
        rest[p] = combine(cost[p], rest[p + 1]).min(axis=1)
    return rest


def _unbeaten(rows: list[int], end: int, f: Array, b: Array, once: Array) -> list[int]:
    """Of cuts that end at the same block, those that no other one beats in all three."""
    if len(rows) == 1:
        return rows  # most often
    kept: list[tuple[float, float]] = []
    chosen: list[int] = []
    columns = (column[rows, end].tolist() for column in (f, b, once))
    costs = zip(*columns, rows, strict=True)
    for _, own_b, own_once, row in sorted(costs):
        most_b, most_once = own_b * _ROUNDING, own_once * _ROUNDING
        if not any(other_b <= most_b and other <= most_once for other_b, other in kept):
            kept.append((own_b, own_once))
            chosen.append(row)
    return chosen
