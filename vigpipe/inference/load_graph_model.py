"""`vigpipe.load_graph_model`: use trained weights of a graph model in a program or a notebook."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vigpipe.config.typed import checked, typed
from vigpipe.graphs.features import are_sparse, for_model, in_memory
from vigpipe.graphs.graph import Graph
from vigpipe.graphs.imports.objects import graph_file_of
from vigpipe.graphs.prepared.graph import PreparedGraph
from vigpipe.graphs.samplers.whole import all_edges
from vigpipe.inference.graph_description import GraphDescription, read_graph_description
from vigpipe.inference.load import build_from, usable_device
from vigpipe.model.staged import StagedModel
from vigpipe.ops.adjacency import Adjacency
from vigpipe.ops.sparse_rows import SparseRows


class GraphInputs(NamedTuple):
    """The inputs of a graph model: `model(*inputs)` are the logits of all nodes, (n, classes).

    Attributes:
        x: features of the nodes, (n, features) float32; sparse if most of them are 0.
        keys: None; in training, what random masks are keyed by.
        adjacency: the edges between the nodes.
    """

    x: Tensor | SparseRows
    keys: None
    adjacency: Adjacency


@dataclass(frozen=True)
class GraphTransform:
    """Prepares a graph as that of the training was: scales features, adds reverse edges.

    Attributes:
        description: what the weights file says of its model and graph.
        device: where the model computes.
    """

    description: GraphDescription
    device: torch.device

    def __call__(self, data: Any, *, data_dir: Path | str = "data") -> GraphInputs:
        """Prepare a graph.

        Args:
            data: a graph file, the name of a data set, or sbm:..., as `vigpipe train --data`; or
                torch-geometric's Data, a NetworkX graph, or arrays by the names of a graph file.
            data_dir: folder of the data sets.

        Raises:
            InputError: there is no such graph, or the model is for others.
        """
        if not isinstance(data, str | os.PathLike):
            like = self.description.choices
            with graph_file_of(data, "data", trains=False, like=like) as path:
                return self(path)
        place = checked("data", data, Path | str)
        graph = self.open(str(place), Path(checked("data_dir", data_dir, Path | str)))
        for note in graph.notes:
            warnings.warn(note, stacklevel=2)
        features = for_model(in_memory(graph.features), are_sparse(graph.features))
        x = features.to(self.device, torch.float32)
        return GraphInputs(x, None, all_edges(graph).to(self.device))

    def open(self, data: str, data_dir: Path, seed: int = 0, *, download: bool = False) -> Graph:
        """Open a graph as `vigpipe predict --data` does, its nodes in the user's order."""
        graph = self.description.open(data, data_dir, seed, download=download)
        return graph.in_users_order() if isinstance(graph, PreparedGraph) else graph


class LoadedGraphModel(NamedTuple):
    """A trained graph model and what it takes to use it.

    Attributes:
        model: in evaluation mode; an ordinary PyTorch module.
        transform: makes the model's inputs of a graph.
        class_names: name of each class, by label.
    """

    model: StagedModel
    transform: GraphTransform
    class_names: tuple[str, ...]


@typed
def load_graph_model(
    weights: Path | str, *, device: torch.device | str = "cpu"
) -> LoadedGraphModel:
    """Load the graph model of a weights file, with what prepares a graph for it.

    Args:
        weights: safetensors file of a run.
        device: where the model is to compute.

    Raises:
        InputError: the file cannot be read, holds no graph model, or has metadata that cannot be
            used.
    """
    path, device = Path(weights), usable_device(device)
    description = read_graph_description(path)
    built = build_from(path, description.build).to(device).eval()
    transform = GraphTransform(description, device)
    return LoadedGraphModel(built, transform, description.names())
