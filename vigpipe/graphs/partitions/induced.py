"""The sub-graph on some nodes of a graph."""

from threading import Lock

import numpy as np

from vigpipe.graphs.graph import Graph, rows_of_kept


class Induced:
    """Takes induced sub-graphs of one graph; the cost grows with the edges of the nodes taken."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._local = np.full(graph.num_nodes, -1, dtype=np.int64)  # all -1 between calls
        self._lock = Lock()  # a thread that reads ahead uses the same table

    def on(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `indptr` and `indices` of exactly the edges between some nodes, and their numbers.

        The numbers, (e,) int64, are those of the graph. The nodes, (m,) int64, ascend, each once;
        ValueError otherwise. Node i of the sub-graph is nodes[i].
        """
        if len(nodes) and not (
            nodes[0] >= 0 and nodes[-1] < len(self._local) and (np.diff(nodes) > 0).all()
        ):
            raise ValueError(f"nodes must ascend from 0 to at most {len(self._local) - 1}")
        rows, edges = self._graph.edges_into(nodes)
        with self._lock:
            self._local[nodes] = np.arange(len(nodes))
            sources = self._local[self._graph.indices[edges]]
            self._local[nodes] = -1
        is_kept = sources >= 0
        return rows_of_kept(rows, is_kept), sources[is_kept], edges[is_kept]
