"""What a partition says about itself."""

import numpy as np
import pytest

from tests.graphs.partitions.small_graphs import make_graph
from vigpipe.graphs.partitions.partition import measured

# 0 ↔ 1 → 2 ↔ 3 and 3 → 3, with 4 alone
GRAPH = make_graph(5, [0, 1, 1, 2, 3, 3], [1, 0, 2, 3, 2, 3])
PARTS = np.array([1, 1, 0, 0, 0])


def test_what_two_parts_keep():
    partition = measured(GRAPH, "metis", PARTS, 2, seconds=1.25)
    assert partition.sizes.tolist() == [3, 2]
    assert (partition.num_kept, partition.num_cut) == (5, 1)
    assert partition.kept_edge_fraction == 5 / 6
    assert partition.balance == 1.2
    assert [partition.nodes_of(part).tolist() for part in (0, 1)] == [[2, 3, 4], [0, 1]]
    assert partition.nodes_of(0).dtype == np.int64
    assert str(partition) == (
        "2 parts (metis): 83.3 % of the edges kept, 1 cut, largest part 1.20 times the mean, "
        "made in 1.2 s"
    )


@pytest.mark.parametrize("num_parts", [255, 256, 257, 65536, 65537])
def test_edges_are_counted_whatever_the_number_of_parts(num_parts):
    """Parts are compared as the smallest integers that hold them, where 256 must not become 0."""
    nodes = np.arange(num_parts)
    ring = make_graph(2 * num_parts, 2 * nodes, 2 * nodes + 1)  # 0 → 1, 2 → 3, ...
    kept = measured(ring, "metis", np.repeat(nodes, 2), num_parts, seconds=0)
    assert kept.num_cut == 0
    assert kept.nodes_of(num_parts - 1).tolist() == [2 * num_parts - 2, 2 * num_parts - 1]
    cut = measured(ring, "metis", np.tile(nodes, 2), num_parts, seconds=0)
    assert cut.num_kept == 0
