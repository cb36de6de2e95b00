"""Read from a weights file which graph model it holds, and what graphs it is for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from vigpipe.config.choices import GRAPH_MODELS, GnnModel
from vigpipe.config.of_weights import count_in, said_options, truth_in
from vigpipe.errors import InputError
from vigpipe.files.names import escaped, first_few
from vigpipe.files.weights_metadata import (
    class_names,
    read_metadata,
    unusable,
)
from vigpipe.graphs.choices import COLUMNS, Choices, differing
from vigpipe.graphs.features import kept_weights
from vigpipe.graphs.graph import NO_CLASS, UNKNOWN, Graph
from vigpipe.graphs.sources import open_graph
from vigpipe.inference.classes import match_classes
from vigpipe.model.gnn.create import create_graph_model
from vigpipe.model.gnn.model import GraphModel

_NEEDED = ("layers", "width", "norm", "features", "symmetric")


@dataclass(frozen=True)
class GraphDescription:
    """Everything that is needed to build a graph model and to prepare its graph."""

    weights: Path  # the file or checkpoint that says so
    model: GnnModel
    num_classes: int
    num_features: int
    multi_label: bool  # whether a node may have several classes
    edge_weights: bool  # whether the edges of its training had weights
    class_names: tuple[str, ...]  # by label; empty if the file has no names
    options: dict[str, Any]  # those of training that the model and its graph depend on
    feature_weights: np.ndarray | None  # of tf-idf, (num_features,) float32
    choices: Choices | None  # how its features were made of columns, if that is known

    def names(self) -> tuple[str, ...]:
        """Name every label: by the file, else by its number."""
        return self.class_names or tuple(map(str, range(self.num_classes)))

    def build(self) -> GraphModel:
        """Build the model, with weights from torch's generator."""
        options = self.options
        return create_graph_model(
            self.model,
            in_channels=self.num_features,
            num_classes=self.num_classes,
            num_layers=options["layers"],
            width=options["width"],
            heads=options.get("heads") or 1,
            aggregator=options.get("aggregator"),
            norm=options["norm"],
        )

    def open(self, data: str, data_dir: Path, seed: int = 0, *, download: bool = False) -> Graph:
        """Open a graph to use the model on; InputError if the model is for other graphs.

        The graph need not have labels, nor nodes of all classes; its classes become the model's.
        """
        options = self.options
        graph = open_graph(
            data,
            data_dir=data_dir,
            download=download,
            features=options["features"],
            symmetric=options["symmetric"],
            seed=seed,
            feature_weights=self.feature_weights,
            multi_label=self.multi_label,
            trains=False,
        )
        self._check(graph, f"--data {data}")
        graph = self._with_classes(graph, f"--data {data}")
        if self.choices is not None and graph.choices is None:
            note = (
                f"--data {data} does not say how its features were made, and the model was trained "
                "on columns of a table: they must have been made as its were"
            )
            return replace(graph, notes=(*graph.notes, note))
        return graph

    def _check(self, graph: Graph, where: str) -> None:
        """Raise InputError if the model is for other features, labels or edges."""
        if self.choices is not None and graph.choices is not None:
            different = [*differing(graph.choices, self.choices)]
            if different:
                raise InputError(
                    f"{where}: makes other features of {first_few(different)} than the graph that "
                    f"{self.weights} was trained on; import it with --like {self.weights}"
                )
        if graph.num_features != self.num_features:
            raise InputError(
                f"{where}: has {graph.num_features} features, but the model in {self.weights} was "
                f"trained on {self.num_features}; give a graph with the same features"
            )
        if graph.is_multi_label != self.multi_label:
            kinds = {True: "any number of classes", False: "one class"}
            raise InputError(
                f"{where}: a node has {kinds[graph.is_multi_label]}, but for the model in "
                f"{self.weights} it has {kinds[self.multi_label]}; give a graph like that of its "
                "training"
            )
        if (graph.edge_weights is not None) != self.edge_weights:
            had = {True: "with weights of edges", False: "without weights of edges"}
            advice = {True: "save them as edge_weight", False: "leave edge_weight out"}
            raise InputError(
                f"{where}: the model in {self.weights} was trained {had[self.edge_weights]}, "
                f"unlike this graph; {advice[self.edge_weights]}"
            )

    def _with_classes(self, graph: Graph, where: str) -> Graph:
        """Return the graph with the model's classes, of which it may have some or none."""
        if not graph.class_names:
            labels = graph.labels
            if self.multi_label:
                labels = np.full((graph.num_nodes, self.num_classes), UNKNOWN, np.int8)
            return replace(graph, labels=labels, class_names=self.names())
        labels, names, notes = match_classes(
            graph.class_names,
            self.class_names,
            self.num_classes,
            where,
            str(self.weights),
            may_be_fewer=not self.multi_label,
        )
        if self.multi_label:
            of_nodes = np.full((graph.num_nodes, self.num_classes), UNKNOWN, np.int8)
            of_nodes[:, labels] = graph.labels
        else:
            of_nodes = np.where(graph.labels == NO_CLASS, NO_CLASS, labels[graph.labels])
        notes = (*graph.notes, *notes)
        return replace(graph, labels=of_nodes, class_names=names, notes=notes)


def read_graph_description(weights: Path, data: str = "GRAPH") -> GraphDescription:
    """Find out which graph model a weights file holds; the errors name the user's --data."""
    return describe_graph_model(read_metadata(weights), weights, data)


def describe_graph_model(
    metadata: Mapping[str, str], weights: Path, data: str = "GRAPH"
) -> GraphDescription:
    """Find out which graph model the metadata are of, as `read_graph_description` does."""
    model = metadata.get("model")
    if model not in GRAPH_MODELS:
        what = "does not name a model" if model is None else f"holds a {escaped(model, 40)}"
        raise InputError(
            f"--data {data}: is for a model of a graph ({', '.join(GRAPH_MODELS)}), but {weights} "
            f"{what}; give the model.safetensors of such a run, or name image files instead"
        )
    options = said_options(metadata, weights)
    for name in _NEEDED:
        if name not in options:
            raise unusable(weights, name, "", "what its run had")
    num_classes, num_features = (
        count_in(metadata, name, weights) for name in ("num_classes", "num_features")
    )
    names = class_names(metadata, weights)
    if names and len(names) != num_classes:
        raise unusable(weights, "class_names", f"{len(names)} names", f"{num_classes} names")
    multi_label = truth_in(metadata, "multi_label", weights)
    return GraphDescription(
        weights,
        cast("GnnModel", model),
        num_classes,
        num_features,
        multi_label,
        truth_in({"edge_weights": "False", **metadata}, "edge_weights", weights),
        names,
        options,
        kept_weights(metadata, weights),
        Choices.parse(metadata[COLUMNS], str(weights)) if metadata.get(COLUMNS) else None,
    )
