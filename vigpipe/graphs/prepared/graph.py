"""A graph that lies in a prepared folder."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vigpipe.graphs.features import in_memory
from vigpipe.graphs.graph import Graph, in_rows
from vigpipe.graphs.partitions.partition import Partition
from vigpipe.graphs.prepared.manifest import Manifest, file_of_part


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedGraph(Graph):
    """A graph that lies in a prepared folder, its nodes in the order of their parts."""

    manifest: Manifest
    stored_loops: np.ndarray  # nodes that have an edge to themselves, ascending, int64
    stored_degrees: np.ndarray | None  # of a graph with weights, (n,) float64
    stored_loop_weights: np.ndarray | None  # the same, (n,) float32

    @cached_property
    def partition(self) -> Partition:
        manifest = self.manifest
        return Partition(
            manifest.partition,
            np.repeat(np.arange(manifest.num_parts), manifest.part_nodes),
            manifest.num_parts,
            manifest.edges,
            manifest.kept_edges,
            manifest.seconds,
            was_read=True,
        )

    @property
    def loops(self) -> np.ndarray:
        return self.stored_loops

    @property
    def degrees(self) -> np.ndarray:
        return np.diff(self.indptr) if self.stored_degrees is None else self.stored_degrees

    @property
    def loop_weights(self) -> np.ndarray | None:
        return self.stored_loop_weights

    @property
    def sha256(self) -> str:
        return self.manifest.graph_sha256

    @property
    def features_sha256(self) -> str:
        manifest = self.manifest
        names = (file_of_part("features", part) for part in range(manifest.num_parts))
        digests = "".join(manifest.files[name].sha256 for name in names)
        return hashlib.sha256(digests.encode()).hexdigest()

    def in_users_order(self) -> Graph:
        """Return the graph in memory, its nodes numbered as in what the folder was made of."""
        assert self.numbers is not None
        names = self.node_names
        order = np.argsort(self.numbers)
        ends = self.numbers[self.sources()], self.numbers[self.targets()]
        indptr, indices, weights = in_rows(*ends, self.num_nodes, self.weights_of(slice(None)))
        return Graph(
            self.name,
            indptr,
            indices,
            in_memory(self.features)[order],  # pyrefly: ignore[bad-argument-type]
            self.labels[order],
            self.split[order],
            self.class_names,
            None if names is None else tuple(names[node] for node in order),
            self.feature_weights,
            edge_weights=weights,
            choices=self.choices,
        )
