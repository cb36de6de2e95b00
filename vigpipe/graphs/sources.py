"""Where a graph comes from: a file, a data set that is known by its name, or a random draw."""

import os
from dataclasses import replace
from pathlib import Path

from vigpipe.errors import InputError
from vigpipe.graphs import sbm
from vigpipe.graphs.features import Scaling, scaled
from vigpipe.graphs.formats import graph_file, named
from vigpipe.graphs.graph import Graph
from vigpipe.graphs.graph import symmetric as both_directions

SUFFIX = ".npz"


def open_graph(
    data: str, *, data_dir: Path, download: bool, features: Scaling, symmetric: bool, seed: int
) -> Graph:
    """Open a graph to train on.

    Args:
        data: the path of a graph file, which ends in .npz; the name of a data set, in capitals or
            not; or sbm:NODES[,CLASSES[,FEATURES[,DEGREE]]] for a random graph.
        data_dir: folder of the data sets, each in a folder of its own.
        download: fetch a data set if it is not there. In a run, one rank downloads before the
            others open the graph.
        features: how they are scaled, see `features.scaled`.
        symmetric: add the reverse of every edge.
        seed: of a random graph.

    Raises:
        InputError: there is no such graph, or it is not one to train on.
    """
    if data.startswith(sbm.PREFIX):
        graph = sbm.draw(data, seed)
    elif data.lower().endswith(SUFFIX):
        # Path's own expanduser raises RuntimeError for an unknown ~user.
        graph = graph_file.read(Path(os.path.expanduser(data)))
    elif data.lower() in named.DATA_SETS:
        graph = named.read(named.DATA_SETS[data.lower()], data_dir, download=download)
    else:
        names = ", ".join(data_set.name for data_set in named.DATA_SETS.values())
        raise InputError(
            f"--data {data}: no such graph; give one of {names}, a graph file (*{SUFFIX}) or "
            f"{sbm.FORM}"
        )
    graph = replace(graph, features=scaled(graph.features, features, f"--data {data}"))
    if symmetric:
        indptr, indices = both_directions(graph)
        graph = replace(graph, indptr=indptr, indices=indices)
    return graph
