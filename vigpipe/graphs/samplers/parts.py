"""Take the parts of a partition, several of them joined."""

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from vigpipe.graphs.graph import TRAIN, Graph
from vigpipe.graphs.partitions.generations import Generations
from vigpipe.graphs.partitions.induced import Induced
from vigpipe.graphs.partitions.partition import Partition, edges_between
from vigpipe.graphs.samplers.sampler import Sampler, SubGraph
from vigpipe.graphs.samplers.whole import weight_tensor
from vigpipe.job.order import epoch_order
from vigpipe.ops.adjacency import Adjacency


class Parts(Sampler):
    """The parts of a partition, in a new order each epoch, several of them joined in a sub-graph.

    A sub-graph of joined parts has the edges between them too (Cluster-GCN, arXiv:1905.07953). The
    last one of a group may have fewer. With D groups, one for each replica, replica r has the parts
    r, r + D, r + 2 D, and so on.
    """

    def __init__(
        self,
        graph: Graph,
        generations: Generations,
        num_joined: int,
        seed: int,
        num_groups: int = 1,
    ) -> None:
        self.generations, self._num_joined, self._seed = generations, num_joined, seed
        self._graph = graph
        self._is_train = graph.split == TRAIN
        self._induced = Induced(graph)
        groups = [generations.most_nodes[group::num_groups] for group in range(num_groups)]
        self.num_sub_graphs = tuple(-(-len(sizes) // num_joined) for sizes in groups)
        self.most_nodes = max(int(np.sort(sizes)[-num_joined:].sum()) for sizes in groups)
        self.most_targets = self.most_nodes
        self.takes_all = self.num_sub_graphs == (1,) and self.most_nodes == graph.num_nodes
        self._parts = lru_cache(2)(self._parts_in_order)  # the next epoch's are drawn ahead
        self._num_train = lru_cache(2)(self._count_training_nodes)
        self._edges = lru_cache(2)(partial(edges_between, graph))
        # Single parts come again in every epoch, so their edges are kept: at most those of the
        # graph. Joined ones hardly ever do.
        self._take = lru_cache(len(generations.most_nodes) if num_joined == 1 else 1)(self._join)

    def draw(self, epoch: int, number: int) -> SubGraph:
        parts = tuple(sorted(self._parts(epoch)[number].tolist()))
        return self._take(self.generations.partition(epoch), parts)

    def num_nodes(self, epoch: int, number: int) -> int:
        return int(self.generations.partition(epoch).sizes[self._parts(epoch)[number]].sum())

    def num_training_nodes(self, epoch: int, number: int) -> int:
        of_parts = self._num_train(self.generations.partition(epoch))
        return int(of_parts[self._parts(epoch)[number]].sum())

    def num_edges(self, epoch: int, number: int) -> int:
        parts = self._parts(epoch)[number]
        return int(self._edges(self.generations.partition(epoch))[parts][:, parts].sum())  # pyrefly: ignore[bad-index, missing-attribute]

    def describe(self) -> str:
        return str(self.generations.partition(1))

    def as_table(self) -> dict[str, object]:
        partition = self.generations.partition(1)
        kept = partition.kept_edge_fraction
        if self._num_joined > 1 and partition.num_edges:
            num_kept = sum(self.num_edges(1, number) for number in range(sum(self.num_sub_graphs)))
            kept = num_kept / partition.num_edges
        return {"kept_edge_fraction": kept, "partition": partition.as_table()}

    def _parts_in_order(self, epoch: int) -> list[np.ndarray]:
        order = epoch_order(self._seed, epoch, len(self.generations.most_nodes))
        num_groups, size = len(self.num_sub_graphs), self._num_joined
        groups = [order[order % num_groups == group] for group in range(num_groups)]
        return [parts[i : i + size] for parts in groups for i in range(0, len(parts), size)]

    def _count_training_nodes(self, partition: Partition) -> np.ndarray:
        return np.bincount(partition.parts[self._is_train], minlength=partition.num_parts)

    def _join(self, partition: Partition, parts: Sequence[int]) -> SubGraph:
        nodes = np.concatenate([partition.nodes_of(part) for part in parts])
        nodes.sort()
        indptr, indices, edges = self._induced.on(nodes)
        rows = torch.from_numpy(indptr), torch.from_numpy(indices)
        weights = weight_tensor(self._graph, edges)
        return SubGraph(nodes, Adjacency(*rows, edge_weights=weights))
