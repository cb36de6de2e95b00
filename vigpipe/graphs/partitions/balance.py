"""Even out the time that parts take, by moving nodes from slow parts to fast ones."""

from typing import Any

import numpy as np
from scipy.sparse import csr_array

# Times the mean that a part may take; METIS's largest part may have as many times the mean nodes.
LIMIT = 1.03


def balanced(
    joined: csr_array,
    parts: np.ndarray,
    costs: np.ndarray,
    num_parts: int,
    most_nodes: int,
    least_limit: float = 0.0,
) -> np.ndarray:
    """Move nodes out of parts that cost more than the mean, with as many neighbours as possible.

    Parts give nodes away one after the other, the most expensive part first. A part first gives
    those nodes that have most neighbours in another part, less those in their own.

    Takes the matrix of `neighbours`, and the part and cost of each node, (n,); those that cost
    nothing stay. Returns the new parts. None grows beyond `most_nodes`, and none costs more than
    LIMIT times the mean, or than `least_limit`, unless no other part can take one of its nodes, or
    it has only one.
    """
    parts = parts.copy()
    loads, sizes = np.bincount(parts, costs, num_parts), np.bincount(parts, minlength=num_parts)
    limit = max(least_limit, LIMIT * costs.sum() / num_parts)
    for part in np.argsort(-loads, kind="stable"):
        if loads[part] <= limit:
            break
        nodes = np.flatnonzero((parts == part) & (costs > 0))
        near = _near(joined, nodes, parts, num_parts)
        own = near[:, part].copy()
        near[:, part] = -1
        order = np.argsort(own - near.max(axis=1), kind="stable")
        for node, of_parts in zip(nodes[order], near[order], strict=True):
            if loads[part] <= limit or sizes[part] == 1:
                break
            can_take = (loads + costs[node] <= limit) & (sizes < most_nodes)
            can_take[part] = False
            if not can_take.any():
                continue
            # Among parts with as many neighbours, the one with the lowest load.
            target = np.lexsort((loads, -of_parts, ~can_take))[0]
            parts[node] = target
            for numbers, number in ((loads, costs[node]), (sizes, 1)):
                numbers[part] -= number
                numbers[target] += number
    return parts


def _near(joined: csr_array, nodes: np.ndarray, parts: np.ndarray, num_parts: int) -> np.ndarray:
    """Count the neighbours of some nodes in every part, (nodes, parts) int64."""
    rows: Any = joined[nodes]  # scipy says it can be any sparse array
    row_of = np.repeat(np.arange(len(nodes)), np.diff(rows.indptr))
    pairs = row_of * num_parts + parts[rows.indices]
    return np.bincount(pairs, minlength=len(nodes) * num_parts).reshape(-1, num_parts)
