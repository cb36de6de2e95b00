"""Reddit's posts, in the two files that DGL publishes.

Source: Hamilton, Ying, Leskovec, Inductive Representation Learning on Large Graphs, NeurIPS 2017
(arXiv 1706.02216); read as torch-geometric's Reddit.
"""

from pathlib import Path

import numpy as np

from vigpipe.files.npy import read_npz
from vigpipe.graphs.formats.checked import make_graph
from vigpipe.graphs.graph import NO_SPLIT, TEST, TRAIN, VALIDATION, Graph

FILES = ("reddit_data.npz", "reddit_graph.npz")
_TYPES = {1: TRAIN, 2: VALIDATION, 3: TEST}


def read(name: str, folder: Path) -> Graph:
    """Read the graph from FILES."""
    nodes = read_npz(folder / FILES[0], ("feature", "label", "node_types"), mapped=("feature",))
    edges = read_npz(folder / FILES[1], ("row", "col"))
    split = np.full(nodes["node_types"].shape, NO_SPLIT)
    for stored, part in _TYPES.items():
        split[nodes["node_types"] == stored] = part
    return make_graph(
        name=name,
        where=str(folder),
        edges=(edges["row"], edges["col"]),
        features=nodes["feature"],
        labels=nodes["label"],
        split=split,
    )
