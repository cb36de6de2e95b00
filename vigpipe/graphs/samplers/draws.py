"""Draw from seed, epoch and number, and with given probabilities."""

from collections.abc import Callable

import numpy as np

# Draws nodes, in any order and perhaps several times.
DrawNodes = Callable[[np.random.Generator], np.ndarray]

_MOST_SIZES = 1 << 12  # sub-graphs that are remembered


def generator(seed: int, epoch: int, number: int) -> np.random.Generator:
    """Return what draws one sub-graph; the seed does not end in 0, which NumPy would ignore."""
    return np.random.default_rng([seed, epoch, 1 + number])


class Sizes:
    """Remembers sizes of the last sub-graphs; one thread may `put` while another calls `get`."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], tuple[int, int]] = {}

    def put(self, epoch: int, number: int, num_nodes: int, num_edges: int) -> None:
        if len(self._sizes) >= _MOST_SIZES:
            self._sizes.clear()
        self._sizes[epoch, number] = num_nodes, num_edges

    def get(self, epoch: int, number: int) -> tuple[int, int] | None:
        return self._sizes.get((epoch, number))


class Urn:
    """Draws numbers independently, in proportion to weights, (n,): none negative, not all 0."""

    def __init__(self, weights: np.ndarray) -> None:
        self._ends = np.cumsum(weights, dtype=np.float64)
        self._last = int(np.flatnonzero(weights)[-1])

    def draw(self, num: int, draws: np.random.Generator) -> np.ndarray:
        """Draw numbers from 0 to n - 1, with replacement, (num,) int64, ascending."""
        points = np.sort(draws.random(num)) * self._ends[-1]
        return np.minimum(np.searchsorted(self._ends, points, side="right"), self._last)


def distinct(values: np.ndarray) -> np.ndarray:
    """Return each of some integers once, ascending; np.unique hashes them, which takes longer."""
    ordered = np.sort(values)
    return ordered[np.diff(ordered, prepend=-1) != 0]


def distinct_nodes(draw_nodes: DrawNodes, seed: int, epoch: int, number: int) -> np.ndarray:
    """Draw the nodes of a sub-graph, each once, ascending."""
    return distinct(draw_nodes(generator(seed, epoch, number)))


def subsets(sizes: np.ndarray, num: int, draws: np.random.Generator) -> np.ndarray:
    """Draw `num` distinct numbers from 0 to s - 1 for each size s, uniformly.

    Bentley, Floyd, "A sample of brilliance", Communications of the ACM 1987, all sizes at once.
    Takes sizes, (m,) int64, each at least `num`; returns (m, num) int64, in no order.
    """
    chosen = np.empty((num, len(sizes)), dtype=np.int64)
    for i in range(num):
        last = sizes - num + i
        number = draws.integers(last + 1)
        is_taken = (chosen[:i] == number).any(axis=0)
        chosen[i] = np.where(is_taken, last, number)
    return chosen.T
